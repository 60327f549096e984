"""PEM files of certificates and keys: why OpenSSL cannot read them."""

import ssl
from pathlib import Path

from toolkit.errors import ConfigError
from toolkit.files import failure, open_file

_CERTIFICATE, _KEY = b"CERTIFICATE-----", b"PRIVATE KEY-----"
_DER = b"\x30"  # first byte of the binary format


def require_certificate(flag: str, path: str) -> None:
    """Raise ConfigError for a file without a certificate that OpenSSL can read."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except OSError:  # also ssl.SSLError
        raise ConfigError(
            f"{flag} {path} cannot be used: {_why_no_certificate(path)}.",
            param=flag.lstrip("-").replace("-", "_"),
        ) from None


def why_no_key(path: str) -> str:
    """Return the reason why OpenSSL cannot read a private key."""
    content = _read(path)
    if isinstance(content, str):
        return content
    if b"ENCRYPTED" in content:
        return (
            "the key is encrypted, and tk does not ask for a password. Decrypt it into a file that "
            f"only you can read: (umask 077; openssl pkey -in {path} -out NEW.pem)"
        )
    if _KEY in content:
        return "the private key in it is damaged; it must have all lines from BEGIN to END"
    if _CERTIFICATE in content:
        return "it has a certificate and no private key"
    return _why_not_pem(content, "private key", f"openssl pkey -inform der -in {path} -out NEW.pem")


def _why_no_certificate(path: str) -> str:
    content = _read(path)
    if isinstance(content, str):
        return content
    if _CERTIFICATE in content:
        return "a certificate in it is damaged; it must have all lines from BEGIN to END"
    if _KEY in content:
        return "it has a private key and no certificate"
    command = f"openssl x509 -inform der -in {path} -out NEW.pem"
    return _why_not_pem(content, "certificate", command)


def _why_not_pem(content: bytes, kind: str, command: str) -> str:
    if content.startswith(_DER):
        return f"it is in the binary format DER and must be PEM. Convert it: {command}"
    return f"it has no PEM {kind}, which begins with a line -----BEGIN {kind.upper()}-----"


def _read(path: str) -> bytes | str:
    """Return a file's content, or why it cannot be read."""
    try:
        with open_file(Path(path)) as file:
            return file.read()
    except OSError as error:
        return failure(error)
