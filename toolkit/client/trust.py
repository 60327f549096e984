"""Certificates that clients trust."""

import ssl
from dataclasses import dataclass

from toolkit.client.wire import ServerError
from toolkit.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Trust:
    """Whom a client trusts over TLS: by default the system's authorities, or SSL_CERT_FILE's."""

    cacert: str | None = None  # file with authorities, instead of those
    insecure: bool = False  # any certificate

    def context(self, url: str) -> ssl.SSLContext:
        """Return the TLS context for an address. Raises ConfigError for an unusable --cacert.

        One for http:// has no authorities, which take 20 ms to read."""
        if not url.startswith("https:"):
            return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context = ssl.create_default_context(cafile=self.cacert)
        except OSError as error:  # also ssl.SSLError
            raise ConfigError(
                f"--cacert {self.cacert} cannot be used: {error.strerror or error}.", param="cacert"
            ) from None
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


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
