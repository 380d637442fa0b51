//! Kimi-K2: DeepSeek-V3 in other sizes, with one group of experts. Its files must state what
//! DeepSeek-V3 has a default for.

use super::{Family, deepseek_v3};
use crate::config::text::SizeDefaults;

pub(super) static FAMILY: Family = Family {
    name: "Kimi-K2",
    model_types: &["kimi_k2"],
    defaults: SizeDefaults { positions: 131_072, ..SizeDefaults::REQUIRED },
    ..deepseek_v3::FAMILY
};
