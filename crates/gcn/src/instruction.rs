//! Instructions as they are executed: operands are resolved, constants expanded, branch targets are
//! indices. Assembly text and code objects both become this.

/// Lanes of a wave.
pub(crate) const LANES: usize = 64;

/// First index of the accumulation registers: `a0` is register 256 of one file of 512.
pub(crate) const ACCUMULATORS: u16 = 256;
/// Vector and accumulation registers.
pub(crate) const VECTOR_REGISTERS: usize = 512;

/// Numbers of the special scalar registers. Pairs are named by their lower half.
pub(crate) const SCALAR_REGISTERS: usize = 128;
pub(crate) const VCC: u8 = 106;
pub(crate) const M0: u8 = 124;
pub(crate) const EXEC: u8 = 126;

/// A 32-bit source of a vector instruction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Source {
    Vector(u16),
    Scalar(u8),
    Constant(u32),
}

/// The part of a 32-bit source that an instruction takes, zero-extended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Select {
    Dword,
    Byte(u8),
    Word(u8),
}

/// A source with its modifiers; absolute value comes before negation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Operand {
    pub(crate) source: Source,
    pub(crate) absolute: bool,
    pub(crate) negate: bool,
    pub(crate) select: Select,
}

impl Operand {
    pub(crate) const fn plain(source: Source) -> Self {
        Self { source, absolute: false, negate: false, select: Select::Dword }
    }
}

/// A 64-bit source of a vector instruction: the lower register of a pair, or a constant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum WideSource {
    Vector(u16),
    Scalar(u8),
    Constant(u64),
}

/// A source of a scalar instruction. Constants have the width of the operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ScalarSource {
    Register(u8),
    Constant(u64),
}

/// An enum of operations, and the mnemonics (without encoding suffix) that name them.
macro_rules! operations {
    ($(#[$meta:meta])* $name:ident { $($operation:ident $mnemonic:literal),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum $name { $($operation),* }

        impl $name {
            pub(crate) fn from_mnemonic(mnemonic: &str) -> Option<Self> {
                match mnemonic {
                    $($mnemonic => Some(Self::$operation),)*
                    _ => None,
                }
            }

            /// Every mnemonic of the group, for tests that must cover them all.
            #[cfg(test)]
            pub(crate) const MNEMONICS: &'static [&'static str] = &[$($mnemonic),*];
        }
    };
}

operations!(
    /// One scalar source.
    ScalarUnary {
        Move32 "s_mov_b32",
        Move64 "s_mov_b64",
        Not32 "s_not_b32",
        Not64 "s_not_b64",
        Reverse32 "s_brev_b32",
        AndSaveExec "s_and_saveexec_b64",
        OrSaveExec "s_or_saveexec_b64",
        AndNotSaveExec "s_andn2_saveexec_b64",
        XorSaveExec "s_xor_saveexec_b64",
    }
);

impl ScalarUnary {
    pub(crate) fn is_wide(self) -> bool {
        !matches!(self, Self::Move32 | Self::Not32 | Self::Reverse32)
    }
}

operations!(
    /// Two scalar sources.
    ScalarBinary {
        AddU32 "s_add_u32",
        AddcU32 "s_addc_u32",
        SubU32 "s_sub_u32",
        SubbU32 "s_subb_u32",
        AddI32 "s_add_i32",
        SubI32 "s_sub_i32",
        MulI32 "s_mul_i32",
        MulHiU32 "s_mul_hi_u32",
        MulHiI32 "s_mul_hi_i32",
        And32 "s_and_b32",
        Or32 "s_or_b32",
        Xor32 "s_xor_b32",
        AndNot32 "s_andn2_b32",
        OrNot32 "s_orn2_b32",
        And64 "s_and_b64",
        Or64 "s_or_b64",
        Xor64 "s_xor_b64",
        AndNot64 "s_andn2_b64",
        OrNot64 "s_orn2_b64",
        Nand64 "s_nand_b64",
        Nor64 "s_nor_b64",
        Xnor64 "s_xnor_b64",
        ShiftLeft32 "s_lshl_b32",
        ShiftRight32 "s_lshr_b32",
        ShiftRightI32 "s_ashr_i32",
        ShiftLeft64 "s_lshl_b64",
        ShiftRight64 "s_lshr_b64",
        ShiftRightI64 "s_ashr_i64",
        ExtractU32 "s_bfe_u32",
        ExtractI32 "s_bfe_i32",
        MinU32 "s_min_u32",
        MaxU32 "s_max_u32",
        MinI32 "s_min_i32",
        MaxI32 "s_max_i32",
        Select32 "s_cselect_b32",
        Select64 "s_cselect_b64",
        ClearBit "s_bitset0_b32",
        SetBit "s_bitset1_b32",
    }
);

impl ScalarBinary {
    pub(crate) fn is_wide(self) -> bool {
        use ScalarBinary as B;
        matches!(
            self,
            B::And64
                | B::Or64
                | B::Xor64
                | B::AndNot64
                | B::OrNot64
                | B::Nand64
                | B::Nor64
                | B::Xnor64
                | B::ShiftLeft64
                | B::ShiftRight64
                | B::ShiftRightI64
                | B::Select64
        )
    }

    /// Whether the destination is also the first source, and not written as such.
    pub(crate) fn is_in_place(self) -> bool {
        matches!(self, Self::ClearBit | Self::SetBit)
    }

    /// Whether SCC says that some bit of the result is set.
    pub(crate) fn is_logic(self) -> bool {
        use ScalarBinary as B;
        let narrow = matches!(self, B::And32 | B::Or32 | B::Xor32 | B::AndNot32 | B::OrNot32);
        narrow || (self.is_wide() && !self.is_wide_shift() && self != B::Select64)
    }

    /// Whether the second source is a 32-bit count beside a 64-bit value.
    pub(crate) fn is_wide_shift(self) -> bool {
        matches!(self, Self::ShiftLeft64 | Self::ShiftRight64 | Self::ShiftRightI64)
    }
}

operations!(
    /// Comparisons of two scalar sources, into SCC.
    ScalarCompare {
        EqualI32 "s_cmp_eq_i32",
        NotEqualI32 "s_cmp_lg_i32",
        GreaterI32 "s_cmp_gt_i32",
        GreaterEqualI32 "s_cmp_ge_i32",
        LessI32 "s_cmp_lt_i32",
        LessEqualI32 "s_cmp_le_i32",
        EqualU32 "s_cmp_eq_u32",
        NotEqualU32 "s_cmp_lg_u32",
        GreaterU32 "s_cmp_gt_u32",
        GreaterEqualU32 "s_cmp_ge_u32",
        LessU32 "s_cmp_lt_u32",
        LessEqualU32 "s_cmp_le_u32",
        EqualU64 "s_cmp_eq_u64",
        NotEqualU64 "s_cmp_lg_u64",
        BitSet "s_bitcmp1_b32",
        BitClear "s_bitcmp0_b32",
    }
);

impl ScalarCompare {
    pub(crate) fn is_wide(self) -> bool {
        matches!(self, Self::EqualU64 | Self::NotEqualU64)
    }
}

operations!(
    /// One vector source.
    Unary {
        Move "v_mov_b32",
        Not "v_not_b32",
        Reverse "v_bfrev_b32",
        FirstBitHighU32 "v_ffbh_u32",
        AccumulatorRead "v_accvgpr_read_b32",
        AccumulatorWrite "v_accvgpr_write_b32",
        ConvertF32I32 "v_cvt_f32_i32",
        ConvertF32U32 "v_cvt_f32_u32",
        ConvertI32F32 "v_cvt_i32_f32",
        ConvertU32F32 "v_cvt_u32_f32",
        Truncate "v_trunc_f32",
        Floor "v_floor_f32",
        RoundEven "v_rndne_f32",
        Reciprocal "v_rcp_f32",
        ReciprocalInteger "v_rcp_iflag_f32",
        SquareRoot "v_sqrt_f32",
        ReciprocalRoot "v_rsq_f32",
    }
);

impl Unary {
    /// Whether the source is a float32.
    pub(crate) fn takes_float(self) -> bool {
        !matches!(
            self,
            Self::Move
                | Self::Not
                | Self::Reverse
                | Self::FirstBitHighU32
                | Self::AccumulatorRead
                | Self::AccumulatorWrite
                | Self::ConvertF32I32
                | Self::ConvertF32U32
        )
    }

    /// Whether the result is a float32.
    pub(crate) fn makes_float(self) -> bool {
        self.takes_float() && !matches!(self, Self::ConvertI32F32 | Self::ConvertU32F32)
    }
}

operations!(
    /// Two vector sources, one result.
    Binary {
        And "v_and_b32",
        Or "v_or_b32",
        Xor "v_xor_b32",
        ShiftLeft "v_lshlrev_b32",
        ShiftRight "v_lshrrev_b32",
        ShiftRightI32 "v_ashrrev_i32",
        AddU32 "v_add_u32",
        SubU32 "v_sub_u32",
        SubrevU32 "v_subrev_u32",
        SubU32Saturated "v_sub_u32 clamp",
        MulLow "v_mul_lo_u32",
        MulHighU32 "v_mul_hi_u32",
        MulHighI32 "v_mul_hi_i32",
        MulU24 "v_mul_u32_u24",
        MulI24 "v_mul_i32_i24",
        MulHighU24 "v_mul_hi_u32_u24",
        MinU32 "v_min_u32",
        MaxU32 "v_max_u32",
        MinI32 "v_min_i32",
        MaxI32 "v_max_i32",
        AddF32 "v_add_f32",
        SubF32 "v_sub_f32",
        SubrevF32 "v_subrev_f32",
        MulF32 "v_mul_f32",
        MaxF32 "v_max_f32",
        MinF32 "v_min_f32",
        ScaleByPower "v_ldexp_f32",
    }
);

impl Binary {
    pub(crate) fn is_float(self) -> bool {
        matches!(
            self,
            Self::AddF32
                | Self::SubF32
                | Self::SubrevF32
                | Self::MulF32
                | Self::MaxF32
                | Self::MinF32
                | Self::ScaleByPower
        )
    }
}

operations!(
    /// Three vector sources, one result.
    Ternary {
        AndOr "v_and_or_b32",
        Or3 "v_or3_b32",
        Insert "v_bfi_b32",
        ExtractU32 "v_bfe_u32",
        ExtractI32 "v_bfe_i32",
        AlignBit "v_alignbit_b32",
        AlignByte "v_alignbyte_b32",
        Permute "v_perm_b32",
        ShiftLeftAdd "v_lshl_add_u32",
        AddShiftLeft "v_add_lshl_u32",
        ShiftLeftOr "v_lshl_or_b32",
        Add3 "v_add3_u32",
        XorAdd "v_xad_u32",
        MadU24 "v_mad_u32_u24",
        MadI24 "v_mad_i32_i24",
        Max3U32 "v_max3_u32",
        Min3U32 "v_min3_u32",
        Med3U32 "v_med3_u32",
        Dot4 "v_dot4_i32_i8",
        Fma "v_fma_f32",
        MultiplyThenAdd "v_mad_f32",
        Med3F32 "v_med3_f32",
        DivideFixup "v_div_fixup_f32",
    }
);

impl Ternary {
    pub(crate) fn is_float(self) -> bool {
        matches!(self, Self::Fma | Self::MultiplyThenAdd | Self::Med3F32 | Self::DivideFixup)
    }
}

operations!(
    /// Comparisons of 32-bit (or 16-bit) sources, into a mask.
    Compare {
        EqualU32 "v_cmp_eq_u32",
        NotEqualU32 "v_cmp_ne_u32",
        LessU32 "v_cmp_lt_u32",
        LessEqualU32 "v_cmp_le_u32",
        GreaterU32 "v_cmp_gt_u32",
        GreaterEqualU32 "v_cmp_ge_u32",
        EqualI32 "v_cmp_eq_i32",
        NotEqualI32 "v_cmp_ne_i32",
        LessI32 "v_cmp_lt_i32",
        LessEqualI32 "v_cmp_le_i32",
        GreaterI32 "v_cmp_gt_i32",
        GreaterEqualI32 "v_cmp_ge_i32",
        EqualU16 "v_cmp_eq_u16",
        NotEqualU16 "v_cmp_ne_u16",
        LessU16 "v_cmp_lt_u16",
        GreaterU16 "v_cmp_gt_u16",
        LessF32 "v_cmp_lt_f32",
        EqualF32 "v_cmp_eq_f32",
        LessEqualF32 "v_cmp_le_f32",
        GreaterF32 "v_cmp_gt_f32",
        LessGreaterF32 "v_cmp_lg_f32",
        GreaterEqualF32 "v_cmp_ge_f32",
        OrderedF32 "v_cmp_o_f32",
        UnorderedF32 "v_cmp_u_f32",
        NotGreaterEqualF32 "v_cmp_nge_f32",
        NotLessGreaterF32 "v_cmp_nlg_f32",
        NotGreaterF32 "v_cmp_ngt_f32",
        NotLessEqualF32 "v_cmp_nle_f32",
        NotEqualF32 "v_cmp_neq_f32",
        NotLessF32 "v_cmp_nlt_f32",
        ClassF32 "v_cmp_class_f32",
    }
);

impl Compare {
    /// Whether both sources are float32 values; a class test reads the bits as they are.
    pub(crate) fn is_float(self) -> bool {
        matches!(
            self,
            Self::LessF32
                | Self::EqualF32
                | Self::LessEqualF32
                | Self::GreaterF32
                | Self::LessGreaterF32
                | Self::GreaterEqualF32
                | Self::OrderedF32
                | Self::UnorderedF32
                | Self::NotGreaterEqualF32
                | Self::NotLessGreaterF32
                | Self::NotGreaterF32
                | Self::NotLessEqualF32
                | Self::NotEqualF32
                | Self::NotLessF32
        )
    }
}

operations!(
    /// Comparisons of 64-bit sources, into a mask.
    WideCompare {
        Equal "v_cmp_eq_u64",
        NotEqual "v_cmp_ne_u64",
        Less "v_cmp_lt_u64",
        LessEqual "v_cmp_le_u64",
        Greater "v_cmp_gt_u64",
        GreaterEqual "v_cmp_ge_u64",
        LessI64 "v_cmp_lt_i64",
        GreaterI64 "v_cmp_gt_i64",
    }
);

operations!(
    /// A 64-bit value shifted by a 32-bit count, which is the first source.
    WideShift {
        Left "v_lshlrev_b64",
        Right "v_lshrrev_b64",
        RightI64 "v_ashrrev_i64",
    }
);

operations!(
    /// Sums and differences with a carry mask.
    Carry {
        Add "v_add_co_u32",
        Sub "v_sub_co_u32",
        Subrev "v_subrev_co_u32",
        AddIn "v_addc_co_u32",
        SubIn "v_subb_co_u32",
        SubrevIn "v_subbrev_co_u32",
    }
);

impl Carry {
    pub(crate) fn takes_carry(self) -> bool {
        matches!(self, Self::AddIn | Self::SubIn | Self::SubrevIn)
    }
}

operations!(
    /// When a branch is taken.
    Condition {
        Always "s_branch",
        SccClear "s_cbranch_scc0",
        SccSet "s_cbranch_scc1",
        VccZero "s_cbranch_vccz",
        VccNotZero "s_cbranch_vccnz",
        ExecZero "s_cbranch_execz",
        ExecNotZero "s_cbranch_execnz",
    }
);

operations!(
    /// Two results in a register pair.
    Packed {
        Add "v_pk_add_f32",
        Multiply "v_pk_mul_f32",
        Fma "v_pk_fma_f32",
        Move "v_pk_mov_b32",
    }
);

operations!(
    /// Matrix products of signed bytes with 32-bit sums.
    Matrix {
        M32x32x8 "v_mfma_i32_32x32x8i8",
        M16x16x16 "v_mfma_i32_16x16x16i8",
        M4x4x4 "v_mfma_i32_4x4x4i8",
        M32x32x4 "v_mfma_i32_32x32x4i8",
        M16x16x4 "v_mfma_i32_16x16x4i8",
        M32x32x16 "v_mfma_i32_32x32x16_i8",
        M16x16x32 "v_mfma_i32_16x16x32_i8",
    }
);

/// How a value lies in memory and in its register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    /// So many dwords in consecutive registers.
    Dwords(u8),
    U8,
    I8,
    U16,
    I16,
}

impl Width {
    pub(crate) fn bytes(self) -> u64 {
        match self {
            Self::Dwords(count) => 4 * count as u64,
            Self::U8 | Self::I8 => 1,
            Self::U16 | Self::I16 => 2,
        }
    }
}

/// The address of an access to global memory, without its constant offset.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Address {
    /// 64 bits in a pair of vector registers.
    Vector(u16),
    /// A scalar base plus a zero-extended vector register.
    ScalarPlus(u8, u16),
}

/// One instruction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Instruction {
    Nop,
    End,
    Barrier,
    Branch {
        condition: Condition,
        target: usize,
    },
    ScalarUnary {
        op: ScalarUnary,
        dst: u8,
        a: ScalarSource,
    },
    ScalarBinary {
        op: ScalarBinary,
        dst: u8,
        a: ScalarSource,
        b: ScalarSource,
    },
    ScalarCompare {
        op: ScalarCompare,
        a: ScalarSource,
        b: ScalarSource,
    },
    /// The address of the next instruction, relative to the program's image.
    GetPc {
        dst: u8,
        next: u64,
    },
    ScalarLoad {
        dst: u8,
        dwords: u8,
        base: u8,
        offset: i64,
    },
    /// Bits `first .. first + count` of MODE.
    SetMode {
        first: u8,
        count: u8,
        value: u32,
    },
    IndexOn {
        index: ScalarSource,
    },
    IndexOff,

    Unary {
        op: Unary,
        dst: u16,
        a: Operand,
    },
    Binary {
        op: Binary,
        dst: u16,
        a: Operand,
        b: Operand,
    },
    Ternary {
        op: Ternary,
        dst: u16,
        a: Operand,
        b: Operand,
        c: Operand,
    },
    Carry {
        op: Carry,
        dst: u16,
        out: u8,
        a: Operand,
        b: Operand,
        carry: u8,
    },
    Compare {
        op: Compare,
        dst: u8,
        a: Operand,
        b: Operand,
    },
    WideCompare {
        op: WideCompare,
        dst: u8,
        a: WideSource,
        b: WideSource,
    },
    WideShift {
        op: WideShift,
        dst: u16,
        count: Operand,
        a: WideSource,
    },
    /// `mask ? b : a`.
    Choose {
        dst: u16,
        a: Operand,
        b: Operand,
        mask: u8,
    },
    WideMad {
        dst: u16,
        carry: u8,
        a: Operand,
        b: Operand,
        c: WideSource,
    },
    /// The same operation for both halves of register pairs; bit `i` of a mask is for source `i`.
    Packed {
        op: Packed,
        dst: u16,
        /// The low registers of the sources.
        sources: [Source; 3],
        /// Which half is taken for the low and for the high result.
        halves: [u8; 2],
        negate: [u8; 2],
    },
    /// `(a << count) + c`.
    WideShiftAdd {
        dst: u16,
        a: WideSource,
        count: Operand,
        c: WideSource,
    },
    DivideScale {
        dst: u16,
        mask: u8,
        a: Operand,
        b: Operand,
        c: Operand,
    },
    DivideFmas {
        dst: u16,
        a: Operand,
        b: Operand,
        c: Operand,
    },
    ReadFirstLane {
        dst: u8,
        source: u16,
    },
    ReadLane {
        dst: u8,
        source: u16,
        lane: ScalarSource,
    },
    WriteLane {
        dst: u16,
        a: ScalarSource,
        lane: ScalarSource,
    },
    Matrix {
        op: Matrix,
        dst: u16,
        a: u16,
        b: u16,
        c: u16,
    },

    GlobalLoad {
        width: Width,
        data: u16,
        address: Address,
        offset: i64,
    },
    GlobalStore {
        width: Width,
        data: u16,
        address: Address,
        offset: i64,
    },
    /// `dwords` per address; the second offset is used by the forms with two addresses.
    SharedLoad {
        dwords: u8,
        data: u16,
        address: u16,
        offsets: [u32; 2],
        two: bool,
    },
    SharedStore {
        dwords: u8,
        data: [u16; 2],
        address: u16,
        offsets: [u32; 2],
        two: bool,
    },
    PrivateLoad {
        dwords: u8,
        data: u16,
        address: Option<u16>,
        offset: u32,
    },
    PrivateStore {
        dwords: u8,
        data: u16,
        address: Option<u16>,
        offset: u32,
    },
}
