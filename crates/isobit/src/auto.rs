//! What `device = "auto"` computes on: the first card that works; where it has too little memory
//! for the run, as many of the cards after it as the run needs; the CPU where no card works.

use crate::backend::{Chosen, listed_cards, works};
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
    // A run that cannot be planned stays on these devices: planning it again reports why.
    let lack_memory = |devices: &[Device]| {
        let run = with(devices);
        match devices {
            [_] => memory_fit(&run, given, ranks).is_ok_and(|fit| fit.device_lacks()),
            _ => split_fit(&run, given, ranks).is_ok_and(|fit| fit.cards_lack()),
        }
    };
    // Texts are generated on one device.
    let most = if planned && run.generate_prompts.is_empty() { usize::MAX } else { 1 };
    let listed = listed_cards();
    let own = share(&listed, ranks).iter().filter(|card| works(**card));
    with(&enough(own.map(|card| Chosen::Gpu(*card).in_config()), most, lack_memory))
}

/// What is to be said of a run that `auto` has placed.
pub(crate) fn note(asked: &Run, placed: &Run) -> Option<&'static str> {
    let is_on_cpu = asked.devices == [Device::Auto] && placed.devices == [Device::Cpu];
    (is_on_cpu && !placed.offload.is_none()).then_some("`offload` does nothing: no card works, so `auto` is the CPU")
}

/// The cards of a rank: an equal part of those of its machine. With fewer cards than ranks, the
/// first ranks have one each.
fn share<'a>(all: &'a [Selector], ranks: Ranks<'_>) -> &'a [Selector] {
    if all.len() < ranks.here {
        return all.get(ranks.index..=ranks.index).unwrap_or_default();
    }
    &all[all.len() * ranks.index / ranks.here..all.len() * (ranks.index + 1) / ranks.here]
}

/// The first cards that do not lack memory, all if they do, at `most` so many; the CPU if there is
/// none. To take a card from the iterator means to open it: only those that are needed are taken.
fn enough(cards: impl Iterator<Item = Device>, most: usize, lack_memory: impl Fn(&[Device]) -> bool) -> Vec<Device> {
    let mut cards = cards.take(most);
    let mut taken = vec![cards.next().unwrap_or(Device::Cpu)];
    while cards.size_hint().1 != Some(0) && lack_memory(&taken) {
        let Some(card) = cards.next() else { break };
        taken.push(card);
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;
    use isobit_kernels::gpu::Api;
    use std::cell::Cell;

    fn three() -> Vec<Selector> {
        (0..3).map(|index| Selector { api: Api::Hip, index }).collect()
    }

    #[test]
    fn as_many_cards_as_a_run_needs() {
        // Cards that are listed, and of these the ones that are opened.
        let taken = |cards: u32, most, needed: usize| {
            let opened = Cell::new(0);
            let all = (0..cards).map(Device::Hip).inspect(|_| opened.set(opened.get() + 1));
            let taken = enough(all, most, |devices| devices.len() < needed);
            (taken.len(), opened.get())
        };
        assert_eq!(taken(3, usize::MAX, 1), (1, 1));
        assert_eq!(taken(3, usize::MAX, 2), (2, 2));
        assert_eq!(taken(3, usize::MAX, 4), (3, 3), "the refusal is that of all");
        assert_eq!(taken(3, 1, 2), (1, 1));
        let not_planned = |_: &[Device]| panic!("planned, where there is no choice");
        assert_eq!(enough(std::iter::empty(), usize::MAX, not_planned), [Device::Cpu]);
        assert_eq!(enough(std::iter::once(Device::Hip(1)), usize::MAX, not_planned), [Device::Hip(1)]);
        // The second one does not work.
        let all = (0..3).map(Device::Hip).filter(|device| *device != Device::Hip(1));
        assert_eq!(enough(all, usize::MAX, |devices| devices.len() < 2), [Device::Hip(0), Device::Hip(2)]);
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
