// What a device must do right before it is used: single operations whose results are known. Inputs
// come from memory, so that no compiler folds them.

KERNEL(1) probe(GLOBAL uint *out, GLOBAL const float *in) {
    out[0] = as_u32(fma_rn(in[0], in[0], -in[1])); // one rounding
    out[1] = as_u32(in[0] * in[0] - in[1]);        // two
    out[2] = as_u32(in[2] * in[3]);                // a subnormal result
    out[3] = as_u32(in[4] * in[5]);                // a subnormal argument
    out[4] = as_u32(div_rn(in[6], in[7]));
    out[5] = as_u32(div_rn(in[4], in[6]));
    out[6] = as_u32(sqrt_rn(in[8]));
    out[7] = as_u32(sqrt_rn(in[4]));
    out[8] = as_u32((float)(int)as_u32(in[9])); // a tie between two float32
    out[9] = (uint)dot4((int)as_u32(in[10]), (int)as_u32(in[11]), -7);
    out[10] = as_u32(in[4] + in[4]);
    out[11] = as_u32(fma_rn(in[2], in[3], in[4]));
}
