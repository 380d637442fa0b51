//! A backend around another one: every op goes through unchanged, and an observer sees it begin and end.
//!
//! Benchmarks time the ops of a step this way; tests change a result, as drifting hardware would, to see who notices. `ops.rs` passes every op on.

mod ops;

use crate::backend::F32;
use crate::op::Product;
use crate::{Backend, Matrix, StoredMatrix};

/// One call of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Call {
    pub op: &'static str,
    /// Of a product: rows, outputs, inputs. Zero elsewhere.
    pub size: [usize; 3],
}

impl Call {
    fn new(op: &'static str) -> Self {
        Self { op, size: [0; 3] }
    }

    fn product(op: &'static str, p: &Product) -> Self {
        Self { op, size: [p.rows(), p.n, p.k] }
    }
}

pub trait Observer<B: Backend> {
    fn before(&self, backend: &B, call: Call);
    /// `result` is what the op wrote, the first of several; none where it is not a buffer of float32.
    fn after(&self, backend: &B, call: Call, result: Option<&mut F32<B>>);
    /// After that: what the op wrote for its gradient alone.
    fn aside(&self, _backend: &B, _call: Call, _result: &mut F32<B>) {}
}

/// `inner`, watched by `observer`.
pub struct Observed<B, O> {
    pub inner: B,
    pub observer: O,
}

impl<B: Backend, O: Observer<B>> Observed<B, O> {
    fn watch<R>(&self, call: Call, run: impl FnOnce() -> R) -> R {
        self.observer.before(&self.inner, call);
        let result = run();
        self.observer.after(&self.inner, call, None);
        result
    }
}

fn stored<B: Backend, O: Observer<B>>(matrix: StoredMatrix<'_, Observed<B, O>>) -> StoredMatrix<'_, B> {
    match matrix {
        StoredMatrix::F32(buffer) => StoredMatrix::F32(buffer),
        StoredMatrix::Bf16(buffer) => StoredMatrix::Bf16(buffer),
        StoredMatrix::F16(buffer) => StoredMatrix::F16(buffer),
    }
}

fn matrix<B: Backend, O: Observer<B>>(operand: Matrix<'_, Observed<B, O>>) -> Matrix<'_, B> {
    match operand {
        Matrix::Stored(matrix) => Matrix::Stored(stored(matrix)),
        Matrix::Sliced(weight) => Matrix::Sliced(weight),
    }
}
