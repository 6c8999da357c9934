//! The names that a pickle of tensors may use, and what each of them means here. Nothing is imported or called.

use safetensors::Dtype;

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Global {
    /// A tensor of a typed storage.
    RebuildTensor2,
    /// A tensor of an untyped storage and an element type.
    RebuildTensor3,
    /// A tensor that a module learns.
    RebuildParameter,
    /// A dict.
    OrderedDict,
    /// A tuple of sizes.
    Size,
    /// A storage whose elements have a type.
    Storage(Dtype),
    /// A storage of bytes.
    Untyped,
    /// An element type.
    Type(Dtype),
}

/// PyTorch's names of element types, as types and as storages.
const TYPES: [(Dtype, &str, Option<&str>); 19] = [
    (Dtype::BOOL, "bool", Some("BoolStorage")),
    (Dtype::U8, "uint8", Some("ByteStorage")),
    (Dtype::I8, "int8", Some("CharStorage")),
    (Dtype::I16, "int16", Some("ShortStorage")),
    (Dtype::I32, "int32", Some("IntStorage")),
    (Dtype::I64, "int64", Some("LongStorage")),
    (Dtype::F16, "float16", Some("HalfStorage")),
    (Dtype::BF16, "bfloat16", Some("BFloat16Storage")),
    (Dtype::F32, "float32", Some("FloatStorage")),
    (Dtype::F64, "float64", Some("DoubleStorage")),
    (Dtype::C64, "complex64", Some("ComplexFloatStorage")),
    (Dtype::U16, "uint16", None),
    (Dtype::U32, "uint32", None),
    (Dtype::U64, "uint64", None),
    (Dtype::F8_E4M3, "float8_e4m3fn", None),
    (Dtype::F8_E5M2, "float8_e5m2", None),
    (Dtype::F8_E8M0, "float8_e8m0fnu", None),
    (Dtype::F8_E4M3FNUZ, "float8_e4m3fnuz", None),
    (Dtype::F8_E5M2FNUZ, "float8_e5m2fnuz", None),
];

/// What a name stands for, if it may be used.
pub(super) fn lookup(module: &str, name: &str) -> Option<Global> {
    match (module, name) {
        ("torch._utils", "_rebuild_tensor_v2") => Some(Global::RebuildTensor2),
        ("torch._utils", "_rebuild_tensor_v3") => Some(Global::RebuildTensor3),
        ("torch._utils", "_rebuild_parameter") => Some(Global::RebuildParameter),
        ("collections", "OrderedDict") => Some(Global::OrderedDict),
        ("torch", "Size") => Some(Global::Size),
        ("torch.storage" | "torch", "UntypedStorage") => Some(Global::Untyped),
        ("torch", _) => TYPES.iter().find_map(|&(dtype, kind, storage)| match name {
            _ if name == kind => Some(Global::Type(dtype)),
            _ if storage == Some(name) => Some(Global::Storage(dtype)),
            _ => None,
        }),
        _ => None,
    }
}

/// PyTorch's names of an element type: of the type, and of its storage where it has a typed one.
pub(super) fn names(dtype: Dtype) -> Option<(&'static str, Option<&'static str>)> {
    TYPES.iter().find(|(known, ..)| *known == dtype).map(|&(_, kind, storage)| (kind, storage))
}
