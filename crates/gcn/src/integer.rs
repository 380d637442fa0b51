//! Integer and bit operations of a lane.

/// The four bytes of a register.
fn bytes(x: u32) -> [i8; 4] {
    x.to_le_bytes().map(|byte| byte as i8)
}

/// `c` plus the products of four signed bytes, wrapping.
#[inline(always)]
pub(crate) fn dot4(a: u32, b: u32, c: u32) -> u32 {
    let (a, b) = (bytes(a), bytes(b));
    let products = (0..4).map(|t| a[t] as i32 * b[t] as i32);
    products.fold(c as i32, i32::wrapping_add) as u32
}

/// Low 24 bits, sign-extended.
#[inline(always)]
pub(crate) fn i24(x: u32) -> i32 {
    (x << 8) as i32 >> 8
}

/// Low 24 bits.
#[inline(always)]
pub(crate) fn u24(x: u32) -> u32 {
    x & 0x00ff_ffff
}

#[inline(always)]
pub(crate) fn extract_u32(x: u32, first: u32, width: u32) -> u32 {
    // BOUND: width is at most 31.
    x >> (first & 31) & ((1 << (width & 31)) - 1)
}

#[inline(always)]
pub(crate) fn extract_i32(x: u32, first: u32, width: u32) -> u32 {
    let width = width & 31;
    let sign = if width == 0 { 0 } else { 1 << (width - 1) };
    (extract_u32(x, first, width) ^ sign).wrapping_sub(sign)
}

/// Low half of `high:low >> count`.
#[inline(always)]
pub(crate) fn align(high: u32, low: u32, count: u32) -> u32 {
    (((high as u64) << 32 | low as u64) >> count) as u32
}

/// Bytes 0 to 3 are those of `b`, 4 to 7 those of `a`; each selector byte names one, a sign, or a
/// constant.
pub(crate) fn permute(a: u32, b: u32, selector: u32) -> u32 {
    let all = (a as u64) << 32 | b as u64;
    let byte = |select: u8| match select {
        0..8 => (all >> (8 * select)) as u8,
        8..12 => {
            let odd = 2 * (select - 8) + 1;
            if all >> (8 * odd + 7) & 1 == 1 { 0xff } else { 0 }
        }
        12 => 0,
        _ => 0xff,
    };
    u32::from_le_bytes(selector.to_le_bytes().map(byte))
}

#[inline(always)]
pub(crate) fn median_u32(a: u32, b: u32, c: u32) -> u32 {
    a.min(b).max(a.max(b).min(c))
}
