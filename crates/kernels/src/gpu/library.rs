//! Vendor libraries, loaded at run time and never linked: machines without them run everything
//! else.

use libloading::Library;

/// Loads the first of `names` that the system finds and never unloads it: drivers cannot always be
/// loaded again.
pub(super) fn open(names: &[&str]) -> Option<&'static Library> {
    // SAFETY: loading runs the library's initialisers; these are the vendors' own drivers, opened
    // by plain file name, and what they may leave behind in this thread is put back below.
    let library = names.iter().find_map(|name| unsafe { Library::new(*name) }.ok());
    crate::float_state::restore();
    let library = library?;
    Some(Box::leak(Box::new(library)))
}

/// A struct of function pointers, loaded from a library. A missing function is an error that names
/// it.
macro_rules! functions {
    ($name:ident { $($field:ident = $symbol:literal ($($argument:ty),* $(,)?) -> $result:ty;)* }) => {
        pub(super) struct $name {
            $(pub(super) $field: unsafe extern "system" fn($($argument),*) -> $result,)*
        }

        impl $name {
            fn load(library: &'static libloading::Library) -> Result<Self, String> {
                Ok(Self {
                    $($field: {
                        // SAFETY: the signature is that of the vendor's header, and the library is
                        // never closed, so that the pointer outlives its borrow.
                        let symbol = unsafe { library.get::<unsafe extern "system" fn($($argument),*) -> $result>($symbol) };
                        *symbol.map_err(|_| format!("the library has no {}", $symbol.to_string_lossy()))?
                    },)*
                })
            }
        }
    };
}
pub(super) use functions;
