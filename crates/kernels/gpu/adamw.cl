// AdamW (docs/numerics.md, "AdamW"): `isobit_numerics::adamw::update` for every element.

KERNEL(GROUP) adamw(
    GLOBAL float *parameter, GLOBAL float *first_moment, GLOBAL float *second_moment, GLOBAL const float *gradient,
    ulong length, float decay, float one_minus_beta1, float beta2, float one_minus_beta2, float step_size,
    float inv_sqrt_c2, float eps) {
    ulong i = (ulong)group_index() * GROUP + local_index();
    if (i >= length) {
        return;
    }
    float g = gradient[i];
    float m = first_moment[i];
    float v = second_moment[i];
    float p = parameter[i] * decay;
    m = fma_rn(one_minus_beta1, g - m, m);
    v = fma_rn(one_minus_beta2, g * g, beta2 * v);
    float d = fma_rn(sqrt_rn(v), inv_sqrt_c2, eps);
    parameter[i] = fma_rn(-step_size, div_rn(m, d), p);
    first_moment[i] = m;
    second_moment[i] = v;
}
