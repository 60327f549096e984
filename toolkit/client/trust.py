"""Certificates that clients trust."""

import ssl
from dataclasses import dataclass

from toolkit.client.wire import ServerError
from toolkit.errors import ConfigError
from toolkit.pem import require_certificate


@dataclass(frozen=True, slots=True)
class Trust:
    """Certificates that a client accepts. Default: of the system's authorities or SSL_CERT_FILE."""

    cacert: str | None = None  # file with authorities, instead of those
    insecure: bool = False  # any certificate

    def __post_init__(self) -> None:
        if self.insecure and self.cacert is not None:
            raise ConfigError(
                "--insecure accepts any certificate: leave out --cacert, or --insecure.",
                param="insecure",
            )

    def context(self) -> ssl.SSLContext:
        """Return the TLS context. Raises ConfigError for a --cacert that cannot be used."""
        if self.cacert is not None:
            require_certificate("--cacert", self.cacert)
        context = ssl.create_default_context(cafile=self.cacert)
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


TRUST = Trust()


class UntrustedError(ServerError):
    """The server's certificate is not trusted."""


def unreachable(url: str, error: BaseException) -> ServerError:
    """Return the error for a server that a client cannot connect to."""
    if (reason := why_untrusted(error)) is not None:
        return UntrustedError(
            f"{url} answers, but its certificate is not trusted: {reason}. --cacert FILE (or "
            "SSL_CERT_FILE) names the certificate of its authority, or its own; --insecure "
            "connects without a check of who answers."
        )
    return ServerError(f"No server answers at {url} ({error}). 'tk serve' starts one.")


def why_untrusted(error: BaseException | None) -> str | None:
    """Return OpenSSL's reason to refuse a certificate, if that is an error's cause; else None."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error.verify_message.rstrip(".")
        error = error.__cause__ or error.__context__
    return None
