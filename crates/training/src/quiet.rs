//! Panics of a dependency that are caught and become errors: they print nothing, because the error
//! says it all. Panics elsewhere print as ever.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// What `work` returns, `None` where it panics.
pub(crate) fn catch<T>(work: impl FnOnce() -> T) -> Option<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let previous = take_hook();
        set_hook(Box::new(move |panic| {
            if !QUIET.get() {
                previous(panic);
            }
        }));
    });
    let before = QUIET.replace(true);
    let result = catch_unwind(AssertUnwindSafe(work));
    QUIET.set(before);
    result.ok()
}
