//! Programs that a training step will need, so that a device can compile them while weights are
//! loaded. A list that is too long or too short costs time and changes nothing else.

use super::attention::ATTENTION;
use super::attention_mma::{self, BACKWARD, FORWARD, SLICES_OF_ROWS};
use super::delta_rule::{DELTA_RULE, DELTA_RULE_GRADIENTS};
use super::device::Gpu;
use super::groups_hopper::{PRODUCT_GROUPS, TRANSPOSE};
use super::hopper::PRODUCT_HOPPER;
use super::low_rank_contract::{LOW_RANK_CONTRACT, SLICE_CONTRACT};
use super::low_rank_outer::LOW_RANK_OUTER;
use super::multi_tensor::{self, MULTI_TENSOR};
use super::program::{Build, Program};
use super::slice_tiles;
use super::slices::{ROW_SLICES, SLICES};
use super::{
    add, balance, columns, combine, conv1d, decay, digest, embedding, gate, gated_norm, grouping, head_loss, l2_norm,
    low_rank, product, product_mma, rms_norm, rope, router, swiglu,
};
use crate::backend::Expected;
use isobit_numerics::slices::Profile;

/// The programs and how each is compiled, those that take longest first.
pub(super) fn programs(gpu: &Gpu, work: &Expected) -> Vec<(&'static Program, Build)> {
    let (sliced, plain) = (Build::from(work.profile), Build::from(Profile::X2));
    // Weights are sliced as they are loaded.
    let mut all: Vec<(&'static Program, Build)> = vec![(&SLICES, sliced)];
    if slice_tiles::serves(gpu) {
        all.extend([(&ROW_SLICES, sliced), (&SLICE_CONTRACT, sliced), (&head_loss::HEAD_SLICES, sliced)]);
    }
    for &(key_width, value_width) in &work.head_widths {
        if work.profile == Profile::X2 && slice_tiles::serves(gpu) {
            let build = attention_mma::build(work.profile, key_width, value_width);
            all.extend([(&BACKWARD, build), (&FORWARD, build), (&SLICES_OF_ROWS, sliced)]);
        } else {
            all.push((&ATTENTION, sliced));
        }
    }
    if work.delta_rule {
        let programs = [&DELTA_RULE_GRADIENTS, &DELTA_RULE, &conv1d::CONV1D, &decay::DECAY, &l2_norm::L2_NORM];
        all.extend(programs.into_iter().chain([&gate::GATE, &gated_norm::GATED_NORM]).map(|it| (it, plain)));
    }
    if slice_tiles::is_hopper(gpu) && work.profile == Profile::X2 {
        all.push((&PRODUCT_HOPPER, sliced));
    } else if slice_tiles::serves(gpu) && !slice_tiles::is_hopper(gpu) {
        all.push((&product_mma::PRODUCT, sliced));
    } else if !slice_tiles::serves(gpu) {
        all.push((&product::PRODUCT, sliced));
    }
    all.push((&low_rank::LOW_RANK, plain));
    if multi_tensor::serves(gpu) {
        let programs = [&LOW_RANK_CONTRACT, &LOW_RANK_OUTER, &MULTI_TENSOR, &digest::DIGEST_MANY];
        all.extend(programs.map(|it| (it, plain)));
    } else {
        all.push((&digest::DIGEST, plain));
    }
    if work.experts {
        let router = Build::from(Profile::X3);
        all.extend([(&router::ROUTER, plain), (&SLICES, router)]);
        if slice_tiles::is_hopper(gpu) {
            all.extend([
                (&PRODUCT_GROUPS, router),
                (&PRODUCT_GROUPS, sliced),
                (&TRANSPOSE, router),
                (&TRANSPOSE, sliced),
            ]);
        }
        let programs = [&grouping::GROUPING, &combine::COMBINE, &balance::BALANCE, &columns::COLUMNS];
        all.extend(programs.map(|it| (it, plain)));
    }
    let rest = [&rms_norm::RMS_NORM, &head_loss::HEAD_LOSS, &swiglu::SWIGLU, &rope::ROPE];
    all.extend(rest.into_iter().chain([&embedding::EMBEDDING, &add::ADD]).map(|it| (it, plain)));
    all
}
