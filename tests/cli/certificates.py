"""Certificates for services that listen beyond this machine."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat


def make_certificate(certificate: Path, key: Path) -> None:
    """What compose/README.md lets openssl make: a certificate that names the Mac and, for itself, localhost."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "studio.local")])
    now = datetime.now(UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("studio.local"), x509.DNSName("localhost")])
    builder = x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number())
    builder = (
        builder.not_valid_before(now).not_valid_after(now + timedelta(days=1)).add_extension(names, critical=False)
    )
    certificate.write_bytes(builder.sign(private, hashes.SHA256()).public_bytes(Encoding.PEM))
    key.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    key.chmod(0o600)
