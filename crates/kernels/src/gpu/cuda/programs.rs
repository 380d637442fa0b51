//! The machine code of programs: from the disk, from a thread that compiled it ahead, or compiled
//! when it is asked for. Threads compile what a program announced while the host loads weights;
//! which of the three gave the code makes no difference to it.

use super::super::code_cache::{Cache, Key, library_files};
use super::super::runtime::Answer;
use super::compiler::Compiler;
use std::cell::RefCell;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Threads that compile ahead; a few, since the host works at the same time.
const THREADS_MAX: usize = 4;
/// The folder of machine code.
const CACHE: &str = "cuda";

/// What is to be compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) source: String,
    /// The compiler's arguments.
    pub(super) line: Vec<String>,
}

/// Machine code, and whether it was on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Made {
    pub(super) code: Vec<u8>,
    pub(super) from_cache: bool,
}

/// What turns a request into machine code.
trait Compile: Send + Sync + 'static {
    fn compile(&self, request: &Request) -> Answer<Vec<u8>>;
}

impl Compile for Compiler {
    fn compile(&self, request: &Request) -> Answer<Vec<u8>> {
        self.machine_code(&request.source, &request.line).map(|(code, _)| code)
    }
}

/// Where an announced program is.
enum Stage {
    Queued,
    Running,
    Done(Answer<Made>),
}

#[derive(Default)]
struct Announced {
    queue: VecDeque<(Key, Request)>,
    stages: BTreeMap<Key, Stage>,
}

struct Shared {
    compiler: Box<dyn Compile>,
    /// Tells compilers apart.
    version: String,
    cache: Option<Cache>,
    announced: Mutex<Announced>,
    /// Notified whenever a program is done.
    done: Condvar,
}

impl Shared {
    fn key(&self, request: &Request) -> Key {
        Key::new(&request.line, &self.version, &request.source)
    }

    /// From the disk, or compiled and put there.
    fn make(&self, key: Key, request: &Request) -> Answer<Made> {
        if let Some(code) = self.cache.as_ref().and_then(|cache| cache.get(key)) {
            return Ok(Made { code, from_cache: true });
        }
        self.make_again(key, request).map(|code| Made { code, from_cache: false })
    }

    fn make_again(&self, key: Key, request: &Request) -> Answer<Vec<u8>> {
        let code = self.compiler.compile(request)?;
        if let Some(cache) = &self.cache {
            cache.put(key, &code);
        }
        Ok(code)
    }

    /// A poisoned lock is fine: every change to the lists is complete in itself.
    fn lock(&self) -> MutexGuard<'_, Announced> {
        self.announced.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Compiles until the queue is empty.
    fn work(&self) {
        loop {
            let mut announced = self.lock();
            let Some((key, request)) = announced.queue.pop_front() else { return };
            announced.stages.insert(key, Stage::Running);
            drop(announced);
            let made = self.make(key, &request);
            self.lock().stages.insert(key, Stage::Done(made));
            self.done.notify_all();
        }
    }

    /// The result of an announced program, if a thread has it or is working on it. One that is
    /// still queued is taken out: the caller compiles it.
    fn announced(&self, key: Key) -> Option<Answer<Made>> {
        let mut announced = self.lock();
        while let Some(Stage::Running) = announced.stages.get(&key) {
            announced = self.done.wait(announced).unwrap_or_else(PoisonError::into_inner);
        }
        announced.queue.retain(|(queued, _)| *queued != key);
        match announced.stages.remove(&key)? {
            Stage::Done(made) => Some(made),
            Stage::Queued | Stage::Running => None,
        }
    }
}

pub(super) struct Programs {
    shared: Arc<Shared>,
    threads: RefCell<Vec<JoinHandle<()>>>,
}

impl Programs {
    pub(super) fn new(compiler: Compiler) -> Self {
        // The version alone does not tell patched releases apart.
        let version = format!("{}, {}", compiler.version(), library_files("libnvrtc.so", &["libnvrtc"]));
        Self::of(Box::new(compiler), version, Cache::of(CACHE))
    }

    fn of(compiler: Box<dyn Compile>, version: String, cache: Option<Cache>) -> Self {
        let shared = Shared { compiler, version, cache, announced: Mutex::default(), done: Condvar::new() };
        Self { shared: Arc::new(shared), threads: RefCell::default() }
    }

    /// Machine code, as soon as there is some.
    pub(super) fn code(&self, request: &Request) -> Answer<Made> {
        let key = self.shared.key(request);
        self.shared.announced(key).unwrap_or_else(|| self.shared.make(key, request))
    }

    /// Compiled, whatever is on disk.
    pub(super) fn code_again(&self, request: &Request) -> Answer<Vec<u8>> {
        self.shared.make_again(self.shared.key(request), request)
    }

    /// Begins to compile in threads of its own, in this order.
    pub(super) fn ahead(&self, requests: Vec<Request>) {
        let mut announced = self.shared.lock();
        let Announced { queue, stages } = &mut *announced;
        for request in requests {
            let key = self.shared.key(&request);
            if let Entry::Vacant(stage) = stages.entry(key) {
                stage.insert(Stage::Queued);
                queue.push_back((key, request));
            }
        }
        let waiting = queue.len();
        drop(announced);
        let mut threads = self.threads.borrow_mut();
        threads.retain(|thread| !thread.is_finished());
        while threads.len() < THREADS_MAX.min(waiting) {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name("compiler".to_string()).spawn(move || shared.work());
            // Without a thread the programs are compiled when they are asked for.
            let Ok(thread) = thread else { return };
            threads.push(thread);
        }
    }
}

impl Drop for Programs {
    /// The compiler must not run on while the process ends.
    fn drop(&mut self) {
        self.shared.lock().queue.clear();
        for thread in self.threads.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Gives the source back and counts; an empty source is refused.
    struct Echo(Arc<AtomicUsize>);

    impl Compile for Echo {
        fn compile(&self, request: &Request) -> Answer<Vec<u8>> {
            self.0.fetch_add(1, Ordering::Relaxed);
            if request.source.is_empty() {
                Err("nothing to compile".to_string())
            } else {
                Ok(request.source.clone().into())
            }
        }
    }

    fn programs() -> (Programs, Arc<AtomicUsize>) {
        let count = Arc::new(AtomicUsize::new(0));
        (Programs::of(Box::new(Echo(Arc::clone(&count))), "1".to_string(), None), count)
    }

    fn request(source: &str) -> Request {
        Request { source: source.to_string(), line: Vec::new() }
    }

    #[test]
    fn every_program_is_compiled_once_whoever_does_it() {
        let (programs, count) = programs();
        let sources: Vec<String> = (0..100).map(|number| format!("program {number}")).collect();
        programs.ahead(sources.iter().map(|source| request(source)).collect());
        programs.ahead(sources.iter().map(|source| request(source)).collect());
        for source in sources.iter().rev() {
            let made = Made { code: source.clone().into(), from_cache: false };
            assert_eq!(programs.code(&request(source)), Ok(made));
        }
        assert_eq!(count.load(Ordering::Relaxed), 100);
        assert!(programs.shared.lock().stages.is_empty() && programs.shared.lock().queue.is_empty());
    }

    #[test]
    fn a_refusal_reaches_whoever_asks() {
        let (programs, _) = programs();
        programs.ahead(vec![request("")]);
        assert_eq!(programs.code(&request("")), Err("nothing to compile".to_string()));
        assert_eq!(programs.code(&request("")), Err("nothing to compile".to_string()));
    }

    #[test]
    fn dropping_waits_for_what_runs_and_leaves_the_rest() {
        let (programs, count) = programs();
        let shared = Arc::clone(&programs.shared);
        programs.ahead((0..1000).map(|number| request(&number.to_string())).collect());
        drop(programs);
        let compiled = count.load(Ordering::Relaxed);
        assert!(shared.lock().queue.is_empty());
        assert_eq!(Arc::strong_count(&shared), 1, "no thread is left");
        assert_eq!(count.load(Ordering::Relaxed), compiled);
    }
}
