//! Types that elements have in a program and in a [`DataType`].

use mccs_ipc::types::DataType;

/// A type that elements have here and in a [`DataType`]. Any bytes are a value of it.
pub trait Element: bytemuck::Pod {
    /// The type's name for collectives.
    const DATA_TYPE: DataType;
}

macro_rules! elements {
    ($($type:ty = $name:ident),+ $(,)?) => {
        $(impl Element for $type { const DATA_TYPE: DataType = DataType::$name; })+
    };
}

elements! {
    i8 = I8, u8 = U8, i32 = I32, u32 = U32, i64 = I64, u64 = U64, f32 = F32, f64 = F64,
    half::f16 = F16, half::bf16 = Bf16,
}
