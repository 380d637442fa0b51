// The gradient of a logit (docs/numerics.md, "Head and loss"): for head_loss.cl and head_slices.cu.

#define IGNORED (-100)

// Of a token that is not ignored. Without a cap, `cap` is zero.
FUNCTION float logit_gradient(float z, float lse, int is_label, float weight, float cap, float cap_inverse) {
    float dz = (isobit_exp(z - lse) - (is_label ? 1.0f : 0.0f)) * weight;
    return cap > 0.0f ? dz * soft_cap_slope(z, cap_inverse) : dz;
}
