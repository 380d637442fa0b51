//! Weight gradients that wait are the gradients that did not wait, bit for bit: for adapters, for
//! everything, for tied heads, under every checkpoint policy and split of the batch.

use crate::hard_to_route::rows_of;
use crate::short_runs::fixture;
use isobit_autograd::{Deferral, Gradients, Policy, Tape};
use isobit_kernels::{Cpu, Device, Path as CpuPath};
use isobit_models::{Built, LoraConfig, Trained};
use isobit_numerics::slices::Profile;
use isobit_training::batch::{Batch, BatchPosition};
use isobit_training::row::Row;

/// Bits of all gradients of a step, with the names of their tensors.
fn gradients(
    cpu: &Cpu,
    built: &Built<Cpu>,
    profile: Profile,
    policy: Policy,
    micro_batch_size: usize,
    deferral: Deferral,
) -> Vec<(String, Vec<u32>)> {
    let rows = rows_of(built.model.config.vocabulary);
    let rows: Vec<&Row> = rows.iter().collect();
    let mut gradients = Gradients::zeros(cpu, &built.parameters);
    for (index, micro) in rows.chunks(micro_batch_size).enumerate() {
        let first_row = (index * micro_batch_size) as u32;
        let batch = Batch::new(cpu, micro, BatchPosition { seed: 3, step: 1, first_row, weight: 0.01 });
        let mut tape =
            Tape::new(cpu, &built.parameters, &batch.layout, profile, policy).defer_weight_gradients(deferral);
        built.model.loss(&mut tape, &batch.ids, &batch.targets).expect("a loss");
        tape.backward(&mut gradients).expect("gradients");
    }
    gradients.combine(cpu);
    let bits = |buffer| cpu.download(buffer).expect("numbers").into_iter().map(f32::to_bits).collect();
    built.parameters.iter().map(|(id, parameter)| (parameter.name.clone(), bits(gradients.get(id)))).collect()
}

#[test]
fn deferred_gradients_have_the_same_bits() {
    let mut lora =
        LoraConfig::new(4, 8.0, &["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]);
    lora.dropout = 0.25;
    let cases = [
        ("qwen2-base", Trained::Lora(lora), Profile::X2),
        ("qwen2-tied", Trained::Full, Profile::X2),
        ("qwen3-base", Trained::Full, Profile::X3),
        ("qwen2-window", Trained::LastBlocks(1), Profile::X2),
        ("qwen3_5-hybrid", Trained::Full, Profile::X2),
        (
            "qwen3_5-hybrid",
            Trained::Lora(LoraConfig::new(3, 3.0, &["q_proj", "in_proj_qkv", "in_proj_b"])),
            Profile::X2,
        ),
        ("llama-bias", Trained::Full, Profile::X2),
        ("llama-bias", Trained::Lora(LoraConfig::new(3, 3.0, &["q_proj", "down_proj"])), Profile::X2),
    ];
    let cpu = Cpu::new(2, CpuPath::best()).expect("a path");
    for (model, trained, profile) in cases {
        let built = fixture(&cpu, model, trained, profile);
        let want = gradients(&cpu, &built, profile, Policy::None, 5, Deferral::None);
        for policy in Policy::ALL {
            for micro_batch_size in [1, 2, 5] {
                for deferral in Deferral::ALL {
                    let got = gradients(&cpu, &built, profile, policy, micro_batch_size, deferral);
                    for ((name, want), (_, got)) in want.iter().zip(&got) {
                        let at = want.iter().zip(got).position(|(want, got)| want != got);
                        assert_eq!(
                            at,
                            None,
                            "{model}, {name}: {deferral:?}, {}, micro-batches of {micro_batch_size}: {:x?} and {:x?}",
                            policy.name(),
                            at.map(|at| want[at]),
                            at.map(|at| got[at])
                        );
                    }
                }
            }
        }
    }
}
