//! What `device = "auto"` computes on: the first card that works; where it has too little memory
//! for the run, as many of the cards after it as the run needs; the CPU where no card works.

use crate::backend::{Chosen, cards};
use crate::fits::{Given, Ranks, memory_fit};
use crate::split::split_fit;
use isobit_kernels::gpu::Selector;
use isobit_training::config::{Device, Run};

/// The run with the devices that `auto` stands for; only one if it is not `planned`. A run that
/// names its devices stays as it is.
pub(crate) fn placed(run: Run, given: &Given, ranks: Ranks<'_>, planned: bool) -> Run {
    if run.devices != [Device::Auto] {
        return run;
    }
    let with = |devices: &[Device]| Run { devices: devices.to_vec(), ..run.clone() };
    // Also if it cannot be planned: what prevents that is said by who plans it next.
    let holds = |devices: &[Device]| {
        let run = with(devices);
        let fits = match devices {
            [_] => memory_fit(&run, given, ranks).map(|fit| fit.fits()),
            _ => split_fit(&run, given, ranks).map(|fit| fit.fits()),
        };
        !matches!(fits, Ok(Some(false)))
    };
    // Texts are generated on one device.
    let most = if planned && run.generate_prompts.is_empty() { usize::MAX } else { 1 };
    // Ranks must know how many cards there are; one process opens no more than it uses.
    let own: Box<dyn Iterator<Item = Selector>> = match ranks.here {
        1 => Box::new(cards()),
        _ => Box::new(share(&cards().collect::<Vec<_>>(), ranks).to_vec().into_iter()),
    };
    with(&enough(own.map(|card| Chosen::Gpu(card).in_config()), most, holds))
}

/// The cards of a rank: an equal part of those of its machine, or one as far as there are as many.
fn share<'a>(all: &'a [Selector], ranks: Ranks<'_>) -> &'a [Selector] {
    if all.len() < ranks.here {
        all.get(ranks.index..=ranks.index).unwrap_or_default()
    } else {
        &all[all.len() * ranks.index / ranks.here..all.len() * (ranks.index + 1) / ranks.here]
    }
}

/// The first devices that are enough; all if they are not, and at `most` so many. A card is not
/// looked at unless those before it are too few: that means to open it.
fn enough(cards: impl Iterator<Item = Device>, most: usize, holds: impl Fn(&[Device]) -> bool) -> Vec<Device> {
    let mut cards = cards.take(most).peekable();
    let mut taken = vec![cards.next().unwrap_or(Device::Cpu)];
    while cards.peek().is_some() && !holds(&taken) {
        taken.extend(cards.next());
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;
    use isobit_kernels::gpu::Api;

    fn three() -> Vec<Selector> {
        (0..3).map(|index| Selector { api: Api::Hip, index }).collect()
    }

    #[test]
    fn as_many_cards_as_a_run_needs() {
        let taken = |cards: u32, most, needed: usize| {
            enough((0..cards).map(Device::Hip), most, |devices| devices.len() >= needed).len()
        };
        assert_eq!(taken(3, usize::MAX, 1), 1);
        assert_eq!(taken(3, usize::MAX, 2), 2);
        assert_eq!(taken(3, usize::MAX, 4), 3, "it does not fit, and the refusal is that of all");
        assert_eq!(taken(3, 1, 2), 1);
        assert_eq!(enough(std::iter::empty(), usize::MAX, |_| panic!("not planned")), [Device::Cpu]);
        assert_eq!(enough(std::iter::once(Device::Hip(1)), usize::MAX, |_| panic!("not planned")), [Device::Hip(1)]);
    }

    #[test]
    fn ranks_of_a_machine_share_its_cards() {
        let of = |here: usize| -> Vec<Vec<usize>> {
            let three = three();
            let cards =
                |index| share(&three, Ranks { here, all: here, index, planned: &[] }).iter().map(|card| card.index);
            (0..here).map(|index| cards(index).collect()).collect()
        };
        assert_eq!(of(2), [vec![0], vec![1, 2]]);
        assert_eq!(of(3), [[0], [1], [2]]);
        assert_eq!(of(4), [vec![0], vec![1], vec![2], vec![]]);
    }
}
