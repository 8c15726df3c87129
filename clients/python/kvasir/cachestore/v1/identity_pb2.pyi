from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TensorType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TENSOR_TYPE_UNSPECIFIED: _ClassVar[TensorType]
    TENSOR_TYPE_FLOAT32: _ClassVar[TensorType]
    TENSOR_TYPE_FLOAT16: _ClassVar[TensorType]
    TENSOR_TYPE_BFLOAT16: _ClassVar[TensorType]

class LayerKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LAYER_KIND_UNSPECIFIED: _ClassVar[LayerKind]
    LAYER_KIND_FULL: _ClassVar[LayerKind]
    LAYER_KIND_WINDOW: _ClassVar[LayerKind]
    LAYER_KIND_LATENT: _ClassVar[LayerKind]
    LAYER_KIND_STATE: _ClassVar[LayerKind]

class ScaleType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCALE_TYPE_UNSPECIFIED: _ClassVar[ScaleType]
    SCALE_TYPE_FLOAT16: _ClassVar[ScaleType]
    SCALE_TYPE_BFLOAT16: _ClassVar[ScaleType]

class KeyRotation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KEY_ROTATION_UNSPECIFIED: _ClassVar[KeyRotation]
    KEY_ROTATION_NONE: _ClassVar[KeyRotation]
    KEY_ROTATION_HADAMARD: _ClassVar[KeyRotation]
TENSOR_TYPE_UNSPECIFIED: TensorType
TENSOR_TYPE_FLOAT32: TensorType
TENSOR_TYPE_FLOAT16: TensorType
TENSOR_TYPE_BFLOAT16: TensorType
LAYER_KIND_UNSPECIFIED: LayerKind
LAYER_KIND_FULL: LayerKind
LAYER_KIND_WINDOW: LayerKind
LAYER_KIND_LATENT: LayerKind
LAYER_KIND_STATE: LayerKind
SCALE_TYPE_UNSPECIFIED: ScaleType
SCALE_TYPE_FLOAT16: ScaleType
SCALE_TYPE_BFLOAT16: ScaleType
KEY_ROTATION_UNSPECIFIED: KeyRotation
KEY_ROTATION_NONE: KeyRotation
KEY_ROTATION_HADAMARD: KeyRotation

class KvIdentity(_message.Message):
    __slots__ = ("weights_digest", "layers", "policy")
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    weights_digest: str
    layers: _containers.RepeatedCompositeFieldContainer[LayerLayout]
    policy: KvPolicy
    def __init__(self, weights_digest: _Optional[str] = ..., layers: _Optional[_Iterable[_Union[LayerLayout, _Mapping]]] = ..., policy: _Optional[_Union[KvPolicy, _Mapping]] = ...) -> None: ...

class LayerLayout(_message.Message):
    __slots__ = ("kind", "window", "kv_heads", "key_dim", "value_dim", "state_tensors")
    KIND_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    KEY_DIM_FIELD_NUMBER: _ClassVar[int]
    VALUE_DIM_FIELD_NUMBER: _ClassVar[int]
    STATE_TENSORS_FIELD_NUMBER: _ClassVar[int]
    kind: LayerKind
    window: int
    kv_heads: int
    key_dim: int
    value_dim: int
    state_tensors: _containers.RepeatedCompositeFieldContainer[StateTensor]
    def __init__(self, kind: _Optional[_Union[LayerKind, str]] = ..., window: _Optional[int] = ..., kv_heads: _Optional[int] = ..., key_dim: _Optional[int] = ..., value_dim: _Optional[int] = ..., state_tensors: _Optional[_Iterable[_Union[StateTensor, _Mapping]]] = ...) -> None: ...

class StateTensor(_message.Message):
    __slots__ = ("type", "shape")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    type: TensorType
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, type: _Optional[_Union[TensorType, str]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class KvPolicy(_message.Message):
    __slots__ = ("key_bits", "value_bits", "group_size", "scale_type", "key_rotation", "exact_layers")
    KEY_BITS_FIELD_NUMBER: _ClassVar[int]
    VALUE_BITS_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    SCALE_TYPE_FIELD_NUMBER: _ClassVar[int]
    KEY_ROTATION_FIELD_NUMBER: _ClassVar[int]
    EXACT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    key_bits: int
    value_bits: int
    group_size: int
    scale_type: ScaleType
    key_rotation: KeyRotation
    exact_layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key_bits: _Optional[int] = ..., value_bits: _Optional[int] = ..., group_size: _Optional[int] = ..., scale_type: _Optional[_Union[ScaleType, str]] = ..., key_rotation: _Optional[_Union[KeyRotation, str]] = ..., exact_layers: _Optional[_Iterable[int]] = ...) -> None: ...
