"""A store's key and self-signed certificate, trusted because its public key is pinned: so it does not expire."""

import base64
import binascii
import datetime
import hashlib
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import NameOID
from kvasir.credentials import read_private_text, write_private_text
from kvasir.errors import InvalidArgument

SERVER_NAME = "kvasir-store"  # in every certificate: a client of gRPC wants a name to compare, and the pin proves all
_FILE_NAME = "identity.pem"
_MAX_CERTIFICATE_BYTES = 4096
_BEGIN = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_END = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
_SIGNS = ec.ECDSA(hashes.SHA256())


@dataclass(frozen=True, slots=True)
class Certificate:
    """A self-signed certificate of a P-256 key, as DER. `read` checks one that came from outside."""

    der: bytes

    @classmethod
    def read(cls, der: bytes, field: str) -> "Certificate":
        """Raises InvalidArgument: no certificate, of another kind of key, or signed by another key."""
        if len(der) > _MAX_CERTIFICATE_BYTES:
            raise InvalidArgument.of(field, f"expected at most {_MAX_CERTIFICATE_BYTES} bytes")
        try:
            parsed = x509.load_der_x509_certificate(der)
            key = parsed.public_key()
            parsed.verify_directly_issued_by(parsed)
        except (ValueError, TypeError, InvalidSignature):
            raise InvalidArgument.of(field, "expected a self-signed certificate in DER") from None
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise InvalidArgument.of(field, "expected a key on the curve P-256")
        return cls(der)

    @classmethod
    def of_text(cls, text: str, field: str) -> "Certificate":
        """As `text` writes it. Raises InvalidArgument."""
        try:
            return cls.read(base64.b64decode(text, validate=True), field)
        except binascii.Error:
            raise InvalidArgument.of(field, "expected a certificate in base64") from None

    @property
    def text(self) -> str:
        return base64.b64encode(self.der).decode()

    @property
    def pem(self) -> bytes:
        return x509.load_der_x509_certificate(self.der).public_bytes(serialization.Encoding.PEM)

    @property
    def pin(self) -> str:
        """SHA-256 of the SubjectPublicKeyInfo, 64 lower-case hex digits: always compared as a whole."""
        return _pin(x509.load_der_x509_certificate(self.der))

    def has_signed(self, signature: bytes, data: bytes) -> bool:
        key = x509.load_der_x509_certificate(self.der).public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey), "read() has checked it"
        try:
            key.verify(signature, data, _SIGNS)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Identity:
    key_pem: bytes
    certificate: Certificate

    def sign(self, data: bytes) -> bytes:
        key = serialization.load_pem_private_key(self.key_pem, password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return key.sign(data, _SIGNS)


def pin_of_pem(pem: bytes) -> str:
    return _pin(x509.load_pem_x509_certificate(pem))


def new_identity() -> Identity:
    """A fresh key, with its certificate. The key's randomness is the system's, as `cryptography` takes it."""
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key()
    # Self-signed certificates of one name would be tried for one another, so the name is the key's.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"kvasir-{_pin_of_key(public)[:32]}")])
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Identity(_pem_of(key), Certificate(signed.public_bytes(serialization.Encoding.DER)))


def identity_file(peers_file: Path) -> Path:
    """Beside the file of peers: they are worth nothing without it."""
    return peers_file.with_name(_FILE_NAME)


def read_identity(path: Path) -> Identity:
    """Raises CredentialFileError (absent, readable by others), InvalidArgument (no key with its certificate)."""
    pem = read_private_text(path).encode()
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError):
        raise InvalidArgument(f"{path}: expected a certificate and its key in PEM", field="identity") from None
    if _pin_of_key(key.public_key()) != _pin(certificate):
        raise InvalidArgument(f"{path}: the key is not the certificate's", field="identity")
    return Identity(_pem_of(key), Certificate.read(certificate.public_bytes(serialization.Encoding.DER), "identity"))


def read_or_make_identity(path: Path) -> Identity:
    """The identity in a file, which is made (0600) when there is none."""
    if not path.exists():
        made = new_identity()
        write_private_text(path, (made.key_pem + made.certificate.pem).decode())
    return read_identity(path)


def _pem_of(key: PrivateKeyTypes) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _pin(certificate: x509.Certificate) -> str:
    return _pin_of_key(certificate.public_key())


def _pin_of_key(key: object) -> str:
    assert hasattr(key, "public_bytes")
    der: bytes = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()
