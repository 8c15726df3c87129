from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PairRequest(_message.Message):
    __slots__ = ("share", "sealed_card", "sealed_signature", "is_refused")
    SHARE_FIELD_NUMBER: _ClassVar[int]
    SEALED_CARD_FIELD_NUMBER: _ClassVar[int]
    SEALED_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    IS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    share: PairingShare
    sealed_card: bytes
    sealed_signature: bytes
    is_refused: bool
    def __init__(self, share: _Optional[_Union[PairingShare, _Mapping]] = ..., sealed_card: _Optional[bytes] = ..., sealed_signature: _Optional[bytes] = ..., is_refused: bool = ...) -> None: ...

class PairResponse(_message.Message):
    __slots__ = ("share", "sealed_card", "sealed_signature")
    SHARE_FIELD_NUMBER: _ClassVar[int]
    SEALED_CARD_FIELD_NUMBER: _ClassVar[int]
    SEALED_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    share: PairingShare
    sealed_card: bytes
    sealed_signature: bytes
    def __init__(self, share: _Optional[_Union[PairingShare, _Mapping]] = ..., sealed_card: _Optional[bytes] = ..., sealed_signature: _Optional[bytes] = ...) -> None: ...

class PairingShare(_message.Message):
    __slots__ = ("protocol", "spake2")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SPAKE2_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    spake2: bytes
    def __init__(self, protocol: _Optional[int] = ..., spake2: _Optional[bytes] = ...) -> None: ...

class PeerCard(_message.Message):
    __slots__ = ("name", "certificate", "address", "engine_address")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    certificate: bytes
    address: str
    engine_address: str
    def __init__(self, name: _Optional[str] = ..., certificate: _Optional[bytes] = ..., address: _Optional[str] = ..., engine_address: _Optional[str] = ...) -> None: ...

class ReloadPeersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReloadPeersResponse(_message.Message):
    __slots__ = ("peers", "ended_calls", "address")
    PEERS_FIELD_NUMBER: _ClassVar[int]
    ENDED_CALLS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedScalarFieldContainer[str]
    ended_calls: int
    address: str
    def __init__(self, peers: _Optional[_Iterable[str]] = ..., ended_calls: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...
