//! The gated delta rule on a GPU (`op/delta_rule.rs`): scores and decays of all chunks at once,
//! then one group per document, value head and block of state columns loops over the chunks; in the
//! backward pass, sums over the value width follow for all chunks at once.

use super::GpuMemory;
use super::device::{Gpu, Groups, arguments, dimension};
use super::memory::{DevicePointer, GpuBuffer, Parts};
use super::program::{Program, program};
use crate::backend::{Checked, Run};
use crate::op::delta_rule::{CHUNK, chunks};
use crate::op::{DeltaRule, DeltaRuleBackward, DeltaRuleForward};

impl Run<DeltaRuleForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut DeltaRuleForward<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>, _: Checked) {
        forward(
            self,
            op.o,
            op.final_state.as_deref_mut(),
            [op.q, op.k, op.v, op.g, op.beta],
            op.initial_state,
            &op.p,
            workspace,
        );
    }
}

impl Run<DeltaRuleBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut DeltaRuleBackward<'_, GpuMemory>, workspace: &mut GpuBuffer<u8>, _: Checked) {
        backward(
            self,
            [&mut *op.dq, &mut *op.dk, &mut *op.dv, &mut *op.dg, &mut *op.dbeta],
            op.d_o,
            [op.q, op.k, op.v, op.g, op.beta],
            &op.p,
            workspace,
        );
    }
}

pub(super) static DELTA_RULE: Program = program!("delta_rule");
pub(super) static DELTA_RULE_GRADIENTS: Program = program!("delta_rule_gradients");

/// `COLUMNS` in `gpu/delta_rule.cl`.
const COLUMNS: usize = 16;
/// `WANT_OUTPUT`, `WANT_STATES`, `WANT_LAST`, `HAS_FIRST` there.
const WANT_OUTPUT: u32 = 1;
const WANT_STATES: u32 = 2;
const WANT_LAST: u32 = 4;
const HAS_FIRST: u32 = 8;

type Inputs<'a> = [&'a GpuBuffer<f32>; 5];
type Outputs<'a> = [&'a mut GpuBuffer<f32>; 5];

/// Elements of the workspace's parts: scores, decays and weighted matrices; then, backward only,
/// one tensor of states, one like `v`, one like `g`.
fn lengths(p: &DeltaRule) -> ([usize; 3], [usize; 3]) {
    let chunks: usize = (0..p.documents()).map(|document| p.document(document).len().div_ceil(CHUNK)).sum();
    let [_, values, scalars, _] = p.lengths();
    let square = 2 * CHUNK * CHUNK;
    (
        [chunks * p.key_heads * square, chunks * p.value_heads * 3 * CHUNK, chunks * p.value_heads * square],
        [chunks * p.value_heads * p.key_width * p.value_width, values, scalars],
    )
}

pub(super) fn workspace(gpu: &Gpu, p: &DeltaRule) -> usize {
    let (both, backward) = lengths(p);
    let bytes = |lengths: [usize; 3]| lengths.into_iter().map(|length| gpu.part::<f32>(length)).sum::<usize>();
    bytes(both) + 2 * bytes(backward)
}

/// The common start of both passes: where chunks and documents lie, scores and decays.
struct Pass<'a> {
    gpu: &'a Gpu,
    p: &'a DeltaRule<'a>,
    inputs: Inputs<'a>,
    /// First token and number of tokens of every chunk.
    chunks: GpuBuffer<u32>,
    chunk_count: usize,
    /// First chunk and number of chunks of every document.
    documents: GpuBuffer<u32>,
    scores: DevicePointer,
    decays: DevicePointer,
    mixed: DevicePointer,
}

impl<'a> Pass<'a> {
    fn new(gpu: &'a Gpu, p: &'a DeltaRule<'a>, inputs: Inputs<'a>, parts: &mut Parts) -> Self {
        let (mut table, mut documents) = (Vec::new(), Vec::new());
        for document in 0..p.documents() {
            documents.extend([table.len() / 2, p.document(document).len().div_ceil(CHUNK)]);
            table.extend(chunks(p.document(document)).flat_map(|tokens| [tokens.start, tokens.len()]));
        }
        let [scores, decays, mixed] = lengths(p).0.map(|length| parts.take::<f32>(length));
        let chunk_count = table.len() / 2;
        let (chunks, documents) = (gpu.offsets(&table), gpu.offsets(&documents));
        let pass = Self { gpu, p, inputs, chunks, chunk_count, documents, scores, decays, mixed };
        pass.prepare();
        pass
    }

    fn shape(&self) -> [u32; 4] {
        [self.p.key_heads, self.p.value_heads, self.p.key_width, self.p.value_width].map(dimension)
    }

    fn prepare(&self) {
        let [key_heads, value_heads, key_width, _] = self.shape();
        let [q, k, _, g, _] = self.inputs;
        let groups = Groups::each(self.chunk_count * self.p.key_heads);
        let arguments = arguments![self.scores, q, k, &self.chunks, key_heads, key_width];
        self.gpu.launch(&DELTA_RULE, "delta_rule_scores", groups, arguments);
        let groups = Groups::of(self.chunk_count * self.p.value_heads, CHUNK);
        let arguments = arguments![self.decays, self.mixed, self.scores, g, &self.chunks, key_heads, value_heads];
        self.gpu.launch(&DELTA_RULE, "delta_rule_decays", groups, arguments);
    }

    /// One group per document, value head and block of columns.
    fn state_groups(&self) -> Groups {
        Groups::each(self.p.documents() * self.p.value_heads * self.p.value_width.div_ceil(COLUMNS))
    }

    /// Loops over the chunks. Outputs that are not `wanted` are not touched.
    fn states(
        &self,
        o: DevicePointer,
        states: DevicePointer,
        y: DevicePointer,
        last: DevicePointer,
        first: DevicePointer,
        wanted: u32,
    ) {
        let [key_heads, value_heads, key_width, value_width] = self.shape();
        let [q, k, v, _, beta] = self.inputs;
        let arguments = arguments![
            o,
            states,
            y,
            last,
            first,
            q,
            k,
            v,
            beta,
            self.decays,
            self.mixed,
            &self.chunks,
            &self.documents,
            key_heads,
            value_heads,
            key_width,
            value_width,
            wanted
        ];
        self.gpu.launch(&DELTA_RULE, "delta_rule_forward", self.state_groups(), arguments);
    }
}

pub(super) fn forward(
    gpu: &Gpu,
    o: &mut GpuBuffer<f32>,
    final_state: Option<&mut GpuBuffer<f32>>,
    inputs: Inputs,
    initial_state: Option<&GpuBuffer<f32>>,
    p: &DeltaRule,
    workspace: &mut GpuBuffer<u8>,
) {
    let pass = Pass::new(gpu, p, inputs, &mut Parts::new(gpu, workspace));
    let mut wanted = WANT_OUTPUT;
    let o = DevicePointer::from(&*o);
    let last = final_state.map_or(o, |state| {
        wanted |= WANT_LAST;
        DevicePointer::from(&*state)
    });
    let first = initial_state.map_or(o, |state| {
        wanted |= HAS_FIRST;
        DevicePointer::from(state)
    });
    pass.states(o, o, o, last, first, wanted);
}

pub(super) fn backward(
    gpu: &Gpu,
    [dq, dk, dv, dg, dbeta]: Outputs,
    d_o: &GpuBuffer<f32>,
    inputs: Inputs,
    p: &DeltaRule,
    workspace: &mut GpuBuffer<u8>,
) {
    let mut parts = Parts::new(gpu, workspace);
    let pass = Pass::new(gpu, p, inputs, &mut parts);
    let [states, y, reads] = lengths(p).1.map(|length| parts.take::<f32>(length));
    let [grads, d_delta, ends] = lengths(p).1.map(|length| parts.take::<f32>(length));
    pass.states(y, states, y, y, y, WANT_STATES);
    let [key_heads, value_heads, key_width, value_width] = pass.shape();
    let [q, k, _, _, beta] = inputs;
    let (decays, mixed, table) = (pass.decays, pass.mixed, &pass.chunks);
    let shape = arguments![key_heads, value_heads, key_width, value_width];
    let dv = DevicePointer::from(&*dv);
    let launch = |program, kernel, groups, arguments: &[_]| {
        gpu.launch(program, kernel, groups, &[arguments, shape].concat());
    };
    let arguments = arguments![grads, d_delta, dv, d_o, q, k, beta, decays, mixed, table, &pass.documents];
    launch(&DELTA_RULE, "delta_rule_backward", pass.state_groups(), arguments);
    let by_value_head = Groups::each(pass.chunk_count * p.value_heads);
    let arguments = arguments![mixed, d_o, dv, y, beta, decays, table, value_heads, value_width];
    gpu.launch(&DELTA_RULE_GRADIENTS, "delta_rule_weights", by_value_head, arguments);
    let arguments = arguments![&*dq, &*dk, reads, ends, d_o, dv, y, beta, q, k, states, grads, decays, mixed, table];
    launch(&DELTA_RULE_GRADIENTS, "delta_rule_sums", Groups::each(pass.chunk_count * p.key_heads), arguments);
    let arguments =
        arguments![&*dg, &*dbeta, reads, ends, y, d_delta, states, grads, pass.scores, decays, mixed, table];
    launch(&DELTA_RULE_GRADIENTS, "delta_rule_scalars", by_value_head, arguments);
}
