//! The complete backend contract on one page: its memory and the ops it runs.
//!
//! `op/` and `docs/numerics.md` specify the arguments and the exact bits of each op. Ops are
//! enqueued in order and arithmetic never fails; a device failure surfaces in `download`, when
//! results are copied to the host. After a failure the device does no more work.

use crate::buffer::Element;
use crate::gpu::PendingRead;
use crate::host::HostOps;
use crate::op::digest::{self, AnyBuffer, DigestSums};
use crate::op::{self, AsQuantized, Attention, DeltaRule, HeadLoss, LowRank, Op, Product, QuantizedShape, SliceShape};
use crate::parcel::Parcel;
use crate::place::Place;
use crate::reference::ReferenceMemory;
use half::{bf16, f16};
use isobit_numerics::digest::Digest;
use isobit_numerics::slices::Profile;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The only list of all ops, by the stem of their files. A backend must run every one.
macro_rules! ops {
    ($($stem:ident: $($op:ident),+;)+) => {
        /// A device that runs every op.
        pub trait Backend: Device $($(+ for<'a> Run<op::$stem::$op<'a, <Self as Device>::Memory>>)+)+ {}

        impl<B: Device> Backend for B where B: $($(for<'a> Run<op::$stem::$op<'a, <B as Device>::Memory>> +)+)+ {}

        /// Stem and name of every op.
        pub const OPS: &[(&str, &str)] =
            &[$($((stringify!($stem), <op::$stem::$op<'static, ReferenceMemory> as Op<ReferenceMemory>>::NAME),)+)+];
    };
}

ops! {
    slices: SliceRows, SliceWeight;
    product: ProductForward, ProductGradInput, ProductGradWeight;
    linear: LinearInput, LinearForward, LinearGradInput;
    product4: Product4Rows, Product4Forward, Product4GradInput;
    low_rank: LowRankContract, LowRankExpand, LowRankOuter;

    bias: BiasForward, BiasBackward;
    add: Add;
    scale: Scale;
    swiglu: SwigluForward, SwigluBackward, SwigluPairsForward, SwigluPairsBackward;
    geglu: GegluForward, GegluBackward;
    clamped_swiglu: ClampedSwigluForward, ClampedSwigluBackward;
    dropout: ApplyDropout;
    elementary: Elementary;
    rms_norm: RmsNormForward, RmsNormBackward;
    rope: RopeForward, RopeBackward;
    columns: CopyColumns;

    attention: AttentionForward, AttentionBackward;
    sink: SinkForward, SinkBackward;
    gate: GateForward, GateBackward;
    conv1d: Conv1dForward, Conv1dBackward;
    l2_norm: L2NormForward, L2NormBackward;
    decay: DecayForward, DecayBackward;
    delta_rule: DeltaRuleForward, DeltaRuleBackward;
    gated_norm: GatedNormForward, GatedNormBackward;

    embedding: EmbeddingForward, EmbeddingBackward;
    head_loss: HeadLossForward, HeadLossBackward, HeadLossStep;

    router: RouterChoose, RouterWeights, RouterBackward;
    grouping: GroupRows;
    balance: BalanceForward, BalanceBackward;
    combine: CombineForward, CombineBackward;

    adamw: AdamWUpdate;
    sum_squares: SumSquares;
    cast: ToBf16, ToF16, ToF32;
    digest: DigestSums;
}

/// How a backend executes one op. Only [`Device::run`] and [`Device::run_in`] can call it: they
/// check the op and provide its workspace.
pub trait Run<O>: Device {
    fn execute(&self, op: &mut O, workspace: &mut Bytes<Self::Memory>, checked: Checked);
}

/// The op passed its [`Op::check`] just now, so a backend checks no length again. Only this file
/// makes one, and a decorator hands it on together with the op.
pub struct Checked(());

/// The storage types of a backend.
pub trait Memory: 'static {
    type Buffer<T: Element>: Length;
    /// Sliced activations: the left operand of a product.
    type Rows: Shaped<SliceShape>;
    /// Sliced weights: the right operand of a product. The shape is their count and the shape of
    /// each.
    type Weight: Shaped<(usize, SliceShape)>;
    /// Frozen 4-bit weights: the right operand of a product.
    type QuantizedWeight: Shaped<QuantizedShape>;
    /// Host memory, where copies of buffers take none of the device's.
    type Host: Memory;
    /// Frozen 4-bit weights in host memory, as the device stores them.
    type HostQuantizedWeight: 'static;
}

/// Buffers by element type.
pub type F32<M> = <M as Memory>::Buffer<f32>;
pub type U32<M> = <M as Memory>::Buffer<u32>;
pub type I32<M> = <M as Memory>::Buffer<i32>;
/// A workspace.
pub type Bytes<M> = <M as Memory>::Buffer<u8>;
/// Host memory beside a device's.
pub type HostBuffer<M, T> = <<M as Memory>::Host as Memory>::Buffer<T>;

/// Has a number of elements.
pub trait Length: 'static {
    fn len(&self) -> usize;

    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A buffer, or a 4-bit weight, whose contents are on their way from host memory; ops take it after
/// [`Device::finish_load`] or [`Device::finish_load_quantized`].
pub struct Arriving<B>(B);

impl<B> Arriving<B> {
    pub(crate) fn new(buffer: B) -> Self {
        Self(buffer)
    }

    pub(crate) fn into_inner(self) -> B {
        self.0
    }
}

/// Has a shape.
pub trait Shaped<S>: 'static {
    fn shape(&self) -> S;
}

/// A device: its memory, and how ops run on it.
pub trait Device {
    type Memory: Memory;

    fn name(&self) -> String;
    /// Peak bytes of the device's own memory held by buffers. None if buffers are in the process's
    /// memory.
    fn device_peak_bytes(&self) -> Option<u64> {
        None
    }
    /// Whether buffers lie in ranges that only grow (`heap.rs`): those that are kept part the room
    /// of others.
    fn has_ranges(&self) -> bool {
        false
    }
    /// A model of this kind is about to be built: a device may prepare for it in the background.
    /// Changes no result.
    fn prepare(&self, _work: &Expected) {}
    /// The ops that follow stand here: for observers. Changes no result.
    fn enter(&self, _place: Place) {}
    fn zeros<T: Element>(&self, length: usize) -> <Self::Memory as Memory>::Buffer<T>;
    /// Zeros that stay through the micro-batches of an update: a device may place them apart from
    /// what comes and goes.
    #[track_caller]
    fn lasting_zeros<T: Element>(&self, length: usize) -> <Self::Memory as Memory>::Buffer<T> {
        self.zeros(length)
    }
    /// A buffer that an op overwrites before anything reads it; not zeroed if the device can leave
    /// that out.
    #[track_caller]
    fn unwritten<T: Element>(&self, length: usize) -> <Self::Memory as Memory>::Buffer<T> {
        self.zeros(length)
    }
    fn upload<T: Element>(&self, host: &[T]) -> <Self::Memory as Memory>::Buffer<T>;
    /// `upload` into an existing buffer of the same length, in place if the backend can.
    fn overwrite<T: Element>(&self, device: &mut <Self::Memory as Memory>::Buffer<T>, host: &[T]) {
        *device = self.upload(host);
    }
    /// `upload` of the `length` numbers that `host` produces. A backend that stores no numbers does
    /// not call `host`.
    fn upload_made<T: Element, H: AsRef<[T]>, E>(
        &self,
        length: usize,
        host: impl FnOnce() -> Result<H, E>,
    ) -> Result<<Self::Memory as Memory>::Buffer<T>, E> {
        let host = host()?;
        assert_eq!(host.as_ref().len(), length, "as many numbers as were announced");
        Ok(self.upload(host.as_ref()))
    }
    fn download<T: Element>(&self, device: &<Self::Memory as Memory>::Buffer<T>) -> Result<Vec<T>, DeviceFailure>;
    /// Begins a `download` without waiting, if the device can. Nothing writes to the buffer until
    /// it is finished.
    fn begin_download<T: Element>(&self, _device: &<Self::Memory as Memory>::Buffer<T>) -> BegunDownload {
        BegunDownload::default()
    }
    /// Waits for the ops before [`Device::begin_download`] of the same buffer, and not for those
    /// after it, if the device can.
    fn finish_download<T: Element>(
        &self,
        _begun: &BegunDownload,
        device: &<Self::Memory as Memory>::Buffer<T>,
    ) -> Result<Vec<T>, DeviceFailure> {
        self.download(device)
    }

    /// Copies a buffer into a parcel of the same length, for another device; does not wait where it
    /// can lock pages. A failure of the device shows at the latest where the parcel arrives.
    fn pack(&self, parcel: &mut Parcel, device: &F32<Self::Memory>) -> Result<(), DeviceFailure> {
        parcel.numbers_mut()?.copy_from_slice(&self.download(device)?);
        Ok(())
    }
    /// Overwrites a buffer with what another device has packed; does not wait for its own copy
    /// where it can lock pages.
    fn unpack(&self, device: &mut F32<Self::Memory>, parcel: &mut Parcel) -> Result<(), DeviceFailure> {
        self.overwrite(device, parcel.numbers()?);
        Ok(())
    }

    /// Zeros in host memory.
    fn host_zeros<T: Element>(&self, length: usize) -> HostBuffer<Self::Memory, T>;
    /// Host memory with the `length` numbers that `make` produces. A backend that stores no numbers
    /// does not call it.
    fn host_made<T: Element, H: AsRef<[T]>, E>(
        &self,
        length: usize,
        make: impl FnOnce() -> Result<H, E>,
    ) -> Result<HostBuffer<Self::Memory, T>, E>;
    /// Copies a buffer to host memory of the same length. A failure of the device shows at the
    /// latest in [`Device::finish_saves`].
    fn save<T: Element>(
        &self,
        host: &mut HostBuffer<Self::Memory, T>,
        device: &<Self::Memory as Memory>::Buffer<T>,
    ) -> Result<(), DeviceFailure>;
    /// Copies host memory to a buffer of the same length.
    fn load<T: Element>(&self, device: &mut <Self::Memory as Memory>::Buffer<T>, host: &HostBuffer<Self::Memory, T>);
    /// A new buffer with a copy of host memory; the ops until [`Device::finish_load`] may run at
    /// the same time.
    #[track_caller]
    fn begin_load<T: Element>(
        &self,
        host: &HostBuffer<Self::Memory, T>,
    ) -> Arriving<<Self::Memory as Memory>::Buffer<T>> {
        let mut device = self.unwritten(host.len());
        self.load(&mut device, host);
        Arriving::new(device)
    }
    fn finish_load<T: Element>(
        &self,
        arriving: Arriving<<Self::Memory as Memory>::Buffer<T>>,
    ) -> <Self::Memory as Memory>::Buffer<T> {
        arriving.into_inner()
    }
    /// Waits until all that was saved is in host memory.
    fn finish_saves(&self) -> Result<(), DeviceFailure> {
        Ok(())
    }
    /// Copies 4-bit weights to host memory. If the device has failed, the copy is arbitrary and the
    /// next `download` reports it.
    fn save_quantized(
        &self,
        weight: <Self::Memory as Memory>::QuantizedWeight,
    ) -> <Self::Memory as Memory>::HostQuantizedWeight;
    /// 4-bit weights from host memory; the ops until [`Device::finish_load_quantized`] may run at
    /// the same time.
    #[track_caller]
    fn begin_load_quantized(
        &self,
        host: &<Self::Memory as Memory>::HostQuantizedWeight,
    ) -> Arriving<<Self::Memory as Memory>::QuantizedWeight>;
    fn finish_load_quantized(
        &self,
        arriving: Arriving<<Self::Memory as Memory>::QuantizedWeight>,
    ) -> <Self::Memory as Memory>::QuantizedWeight {
        arriving.into_inner()
    }
    /// The host's arithmetic on its memory, with the same bits as the device's.
    fn host(&self, threads: usize) -> Result<Rc<dyn HostOps<<Self::Memory as Memory>::Host>>, DeviceFailure>;

    fn rows(&self, shape: SliceShape) -> <Self::Memory as Memory>::Rows;
    /// `count` weights of `shape` each, stored consecutively.
    fn weight(&self, count: usize, shape: SliceShape) -> <Self::Memory as Memory>::Weight;
    /// Weights of one shape, stored consecutively; each has passed its `check`. `make` is called
    /// for one at a time, in order; a backend that stores no numbers does not call it.
    fn quantized_weight<Q: AsQuantized, E>(
        &self,
        shape: QuantizedShape,
        make: impl FnMut(usize) -> Result<Q, E>,
    ) -> Result<<Self::Memory as Memory>::QuantizedWeight, E>;

    /// The workspace sizes of ops on this device.
    fn workspaces(&self) -> &dyn Workspaces;
    /// The workspace shared by all ops, which run sequentially.
    fn scratch(&self) -> &Scratch<Self::Memory>;

    fn run<O: Op<Self::Memory>>(&self, mut op: O)
    where
        Self: Run<O> + Sized,
    {
        op.check();
        let bytes = op.workspace(self.workspaces());
        self.scratch().with(self, bytes, |workspace| self.execute(&mut op, workspace, Checked(())));
    }

    /// [`Self::run`] in the workspace of the op that this one is a part of.
    fn run_in<O: Op<Self::Memory>>(&self, workspace: &mut Bytes<Self::Memory>, mut op: O)
    where
        Self: Run<O> + Sized,
    {
        op.check();
        self.execute(&mut op, workspace, Checked(()));
    }
}

/// What a model will compute, as far as it decides which programs a device needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    pub profile: Profile,
    /// Widths of keys and values of its attention.
    pub head_widths: BTreeSet<(usize, usize)>,
    pub experts: bool,
    pub delta_rule: bool,
}

/// Workspace bytes of ops, from their parameters alone: enough to plan a device's memory without
/// any data.
pub trait Workspaces {
    fn product(&self, _p: &Product) -> usize {
        0
    }
    fn linear(&self, p: &Product, adapter: Option<&LowRank>) -> usize {
        self.product(p).max(adapter.map_or(0, |adapter| self.low_rank(adapter)))
    }
    fn product4(&self, _w: QuantizedShape, _p: &Product) -> usize {
        0
    }
    fn low_rank(&self, _p: &LowRank) -> usize {
        0
    }
    fn low_rank_outer(&self, _parts: &[LowRank]) -> usize {
        0
    }
    fn attention(&self, _p: &Attention) -> usize {
        0
    }
    fn delta_rule(&self, _p: &DeltaRule) -> usize {
        0
    }
    fn embedding(&self, _tokens: usize) -> usize {
        0
    }
    fn head_loss(&self, _p: &HeadLoss) -> usize {
        0
    }
    fn head_loss_step(&self, p: &HeadLoss) -> usize {
        self.head_loss(p)
    }
    fn balance(&self, _row_starts: &[usize], _experts: usize) -> usize {
        0
    }
    fn grouping(&self, _row_starts: &[usize], _experts: usize) -> usize {
        0
    }
    /// Of a sum over tokens for each of `width` columns.
    fn token_sums(&self, _row_starts: &[usize], _width: usize) -> usize {
        0
    }
}

/// A workspace that grows to the largest size requested.
pub struct Scratch<M: Memory>(Mutex<Option<Bytes<M>>>);

impl<M: Memory> Default for Scratch<M> {
    fn default() -> Self {
        Self::new()
    }
}

impl<M: Memory> Scratch<M> {
    pub const fn new() -> Self {
        Self(Mutex::new(None))
    }

    pub fn bytes(&self) -> usize {
        self.lock().as_ref().map_or(0, Length::len)
    }

    /// Frees the memory; the next op allocates it again.
    pub fn clear(&self) {
        *self.lock() = None;
    }

    /// Runs `work` with at least `bytes` of workspace. `work` must not request the scratch again.
    fn with<D: Device<Memory = M>>(&self, device: &D, bytes: usize, work: impl FnOnce(&mut Bytes<M>)) {
        let mut held = self.lock();
        if held.as_ref().is_some_and(|held| held.len() < bytes) {
            // Freed before the larger one is allocated: the peak is the larger one alone.
            *held = None;
        }
        work(held.get_or_insert_with(|| device.zeros(bytes)));
    }

    /// A poisoned lock is fine: a workspace has no content to corrupt.
    fn lock(&self) -> MutexGuard<'_, Option<Bytes<M>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A device failed: it is lost, out of memory, or refused a program. Arithmetic never fails.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{device}: {what}")]
pub struct DeviceFailure {
    pub device: String,
    pub what: String,
}

impl DeviceFailure {
    /// How `what` begins if the device has no memory for a buffer.
    pub const NO_MEMORY: &'static str = "no memory for a buffer";

    /// Whether the device had no memory for a buffer.
    pub fn is_out_of_memory(&self) -> bool {
        self.what.starts_with(Self::NO_MEMORY)
    }
}

/// A weight matrix in one of the stored number formats.
pub enum StoredMatrix<'a, M: Memory> {
    F32(&'a M::Buffer<f32>),
    Bf16(&'a M::Buffer<bf16>),
    F16(&'a M::Buffer<f16>),
}

/// A weight operand of a product: stored numbers, sliced on the fly, or already sliced. Both give
/// the same bits.
pub enum Matrix<'a, M: Memory> {
    Stored(StoredMatrix<'a, M>),
    Sliced(&'a M::Weight),
}

impl<M: Memory> StoredMatrix<'_, M> {
    pub fn len(&self) -> usize {
        match self {
            Self::F32(w) => w.len(),
            Self::Bf16(w) => w.len(),
            Self::F16(w) => w.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<M: Memory> Clone for StoredMatrix<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<M: Memory> Copy for StoredMatrix<'_, M> {}
impl<M: Memory> Clone for Matrix<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<M: Memory> Copy for Matrix<'_, M> {}

/// A copy to the host that has begun. Dropping it gives it up.
#[derive(Default)]
pub struct BegunDownload(pub(crate) Option<PendingRead>);

/// Digests in progress; the device may still be computing them.
pub struct BegunDigests<M: Memory> {
    sums: U32<M>,
    begun: BegunDownload,
    bytes: Vec<usize>,
}

impl<M: Memory> BegunDigests<M> {
    /// Starts the digests of the current contents of `tensors` without waiting.
    pub fn new<B>(device: &B, tensors: &[AnyBuffer<M>]) -> Self
    where
        B: Device<Memory = M> + for<'a> Run<DigestSums<'a, M>>,
    {
        let bytes = tensors.iter().map(AnyBuffer::bytes).collect();
        let mut sums = device.unwritten(digest::SUM_WORDS * tensors.len());
        device.run(DigestSums { sums: &mut sums, tensors });
        let begun = device.begin_download(&sums);
        Self { sums, begun, bytes }
    }

    /// Waits for the digests, and not for ops that were enqueued after them, if the device can.
    pub fn finish<B: Device<Memory = M>>(&self, device: &B) -> Result<Vec<Digest>, DeviceFailure> {
        let sums = device.finish_download(&self.begun, &self.sums)?;
        let each = sums.as_chunks::<{ digest::SUM_WORDS }>().0.iter().zip(&self.bytes);
        Ok(each.map(|(sums, bytes)| digest::finish(sums, *bytes)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::{LinearForward, SwigluForward};
    use crate::{Cpu, Path, Reference};
    use isobit_numerics::slices::Profile;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    fn refusal(run: impl FnOnce()) -> String {
        let thrown = catch_unwind(AssertUnwindSafe(run)).expect_err("refused");
        thrown.downcast_ref::<String>().cloned().unwrap_or_else(|| thrown.downcast::<&str>().expect("text").to_string())
    }

    fn refuses_wrong_sizes<B: Backend>(backend: &B) {
        let [mut h, gate, up] = [4, 3, 4].map(|length| backend.zeros::<f32>(length));
        let swiglu = refusal(|| backend.run(SwigluForward { h: &mut h, gate: &gate, up: &up }));
        assert_eq!(swiglu, "swiglu_forward: `gate` has 3 elements where 4 are needed");
        let part = refusal(|| {
            backend.run_in(&mut backend.zeros(0), SwigluForward { h: &mut h, gate: &gate, up: &up });
        });
        assert_eq!(part, swiglu);

        let linear = |segments: &[usize], k: usize| {
            let p = Product { segments, n: 2, k, profile: Profile::X2, accumulate: false };
            let x = backend.rows(SliceShape { rows: p.rows(), width: k, profile: p.profile });
            let [mut y, w] = [p.rows() * p.n, p.weights() * p.n * k].map(|length| backend.zeros::<f32>(length));
            let w = Matrix::Stored(StoredMatrix::F32(&w));
            refusal(|| backend.run(LinearForward { y: &mut y, x: &x, w, p, bias: None, adapter: None }))
        };
        assert_eq!(linear(&[2, 1], 4), "segments ascend from 0, not as [2, 1]");
        assert_eq!(linear(&[0, 1, 2], 4), "a linear layer has one weight, and inputs");
        assert_eq!(linear(&[0, 1], 0), "a linear layer has one weight, and inputs");
    }

    #[test]
    fn an_op_with_wrong_sizes_is_refused_before_a_backend_sees_it() {
        refuses_wrong_sizes(&Reference);
        refuses_wrong_sizes(&Cpu::new(1, Path::Scalar).expect("every machine has this path"));
    }
}
