//! `--memory` of `plan`, `train` and `bench step`: what the buffers of a card may take together.
//! What its driver takes beside them is not counted. One number holds for every card of a list;
//! several are for its entries in order, and those of a card that is listed twice add up. The CPU
//! has no such limit: for it a number is the memory of a machine, which only `plan` can be told.

use crate::Failure;
use crate::backend::Chosen;
use isobit_kernels::gpu::{MemoryLimit, Selector};
use std::sync::Arc;

/// How the limit is named in messages.
pub(crate) const NAME: &str = "--memory";

/// What `memories` says of the entry at a place of the list.
pub(crate) fn of_entry(memories: &[u64], devices: &[Chosen], at: usize) -> Option<u64> {
    let is_card = |device: &Chosen| matches!(device, Chosen::Gpu(_));
    match memories {
        // It is said of the cards, if there are any.
        [one] => (is_card(&devices[at]) || !devices.iter().any(is_card)).then_some(*one),
        each => each.get(at).copied(),
    }
}

/// One number for all entries of the list, or one for each.
pub(crate) fn check(memories: &[u64], devices: usize) -> Result<(), Failure> {
    if memories.len() < 2 || memories.len() == devices {
        return Ok(());
    }
    if devices == 1 {
        return Err(Failure::usage("several memories are given for one device", "give one: --memory 32GiB"));
    }
    let message = format!("{} memories are given for {devices} devices", memories.len());
    Err(Failure::usage(message, "give one for all, or one for each: --memory 32GiB,32GiB"))
}

/// The same for a run, in which only cards have a limit.
pub(crate) fn check_cards(memories: &[u64], devices: &[Chosen]) -> Result<(), Failure> {
    check(memories, devices.len())?;
    if memories.is_empty() || devices.iter().any(|device| matches!(device, Chosen::Gpu(_))) {
        return Ok(());
    }
    let hint = "name a card with `--device`; `ulimit -v` limits the memory of a process";
    Err(Failure::usage("--memory limits the memory of a card, and this run is on the CPU", hint))
}

/// The limit of each entry; entries of one card share theirs.
pub(crate) fn limits(memories: &[u64], devices: &[Chosen]) -> Vec<Option<Arc<MemoryLimit>>> {
    let mut cards: Vec<(Selector, Arc<MemoryLimit>)> = Vec::new();
    let limit = |device: &Chosen| {
        let Chosen::Gpu(selector) = device else { return None };
        if let Some((_, limit)) = cards.iter().find(|(card, _)| card == selector) {
            return Some(Arc::clone(limit));
        }
        let entries = (0..devices.len()).filter(|at| devices[*at] == *device);
        let entries = entries.filter_map(|at| of_entry(memories, devices, at));
        let bytes = if memories.len() > 1 { entries.reduce(u64::saturating_add) } else { entries.min() };
        let limit = Arc::new(MemoryLimit::new(bytes?));
        cards.push((*selector, Arc::clone(&limit)));
        Some(limit)
    };
    devices.iter().map(limit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(names: &[&str]) -> Vec<Chosen> {
        Chosen::parse_list(names, 1).expect("devices")
    }

    #[test]
    fn one_number_is_for_every_card() {
        let devices = list(&["cuda:0", "cpu", "hip:0"]);
        let of = |memories: &[u64]| [0, 1, 2].map(|at| of_entry(memories, &devices, at));
        assert_eq!(of(&[]), [None; 3]);
        assert_eq!(of(&[5]), [Some(5), None, Some(5)]);
        assert_eq!(of(&[5, 6, 7]), [Some(5), Some(6), Some(7)]);
        let cpus = list(&["cpu", "cpu"]);
        assert_eq!([0, 1].map(|at| of_entry(&[5], &cpus, at)), [Some(5), Some(5)], "the memory of a machine");
    }

    #[test]
    fn a_card_that_is_listed_twice_has_one_limit() {
        let devices = list(&["cuda:0", "cpu", "cuda:0", "cuda:1"]);
        let shown = |memories: &[u64]| -> Vec<String> {
            let all = limits(memories, &devices);
            assert!(
                memories.is_empty() || all[0].as_ref().zip(all[2].as_ref()).is_some_and(|(a, b)| Arc::ptr_eq(a, b))
            );
            all.iter().map(|limit| limit.as_ref().map_or(String::new(), |limit| format!("{limit:?}"))).collect()
        };
        let text = |bytes: u64| format!("{:?}", MemoryLimit::new(bytes));
        assert_eq!(shown(&[5]), [text(5), String::new(), text(5), text(5)]);
        assert_eq!(shown(&[5, 9, 6, 7]), [text(11), String::new(), text(11), text(7)]);
        assert_eq!(shown(&[]), vec![String::new(); 4]);
    }
}
