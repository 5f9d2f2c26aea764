"""Ed25519 keys in files: ``NAME`` (private, mode 0600, PKCS#8 PEM) and ``NAME.pub``.

Takes: paths, a passphrase. Gives: signers and public keys of securesystemslib. Never: prints a
private key, writes one that others can read, or overwrites one.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from securesystemslib.signer import CryptoSigner, SSlibKey

from rollart_core.errors import RegistryError

PASSPHRASE_VARIABLE: Final = "ROLLART_KEY_PASSPHRASE"
Ask = Callable[[str], str]
"""Asks the user a question, hides the typed answer, and returns it."""


def make_key(path: Path, passphrase: str | None) -> SSlibKey:
    """Create a key pair: the private key in ``path``, the public one in ``path.pub``.

    Args:
        path: A file that does not exist.
        passphrase: Encrypts the private key; None or empty means no encryption.

    Raises:
        RegistryError: If a file of that name exists or cannot be written.
    """
    private = Ed25519PrivateKey.generate()
    how: KeySerializationEncryption = NoEncryption()
    if passphrase:
        how = BestAvailableEncryption(passphrase.encode())
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how)
    public_path = public_file(path)
    if path.exists() or public_path.exists():
        raise RegistryError(f"{path} or {public_path.name} exists: a key is never overwritten")
    public = private.public_key()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_new(path, pem, 0o600)
        lines = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        _write_new(public_path, lines, 0o644)
    except OSError as e:
        raise RegistryError(f"cannot write the key {path}: {e.strerror}") from e
    return SSlibKey.from_crypto(public)


def public_file(path: Path) -> Path:
    """Return the path of the public key of the private key ``path``."""
    return path.with_name(f"{path.name}.pub")


def load_public(path: Path) -> SSlibKey:
    """Return the public key in a file.

    Raises:
        RegistryError: If there is none, or if the file is a private key.
    """
    try:
        pem = path.read_bytes()
    except OSError as e:
        raise RegistryError(f"cannot read the key {path}: {e.strerror}") from e
    if b"PRIVATE KEY" in pem:
        raise RegistryError(f"{path} is a private key: give its public key, {public_file(path)}")
    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise RegistryError(f"{path} is not an Ed25519 public key: use `rollart registry keygen`")
    return SSlibKey.from_crypto(key)


def load_signer(path: Path, ask: Ask | None = None) -> CryptoSigner:
    """Return the signer of a private key.

    Args:
        path: The private key's file.
        ask: Asks for the passphrase of an encrypted key if the environment variable
            ``ROLLART_KEY_PASSPHRASE`` is not set.

    Raises:
        RegistryError: If the file is missing, readable by others, not a key, or cannot be
            decrypted.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        pem = path.read_bytes()
    except OSError as e:
        raise RegistryError(f"cannot read the key {path}: {e.strerror}") from e
    if os.name == "posix" and mode & 0o077:
        raise RegistryError(f"other users can read {path} (mode {mode:o}): chmod 600 {path}")
    if b"PRIVATE KEY" not in pem:
        raise RegistryError(f"{path} is not a private key; `rollart registry keygen` makes one")
    private = _unlocked(path, pem, ask)
    if not isinstance(private, Ed25519PrivateKey):
        raise RegistryError(f"{path} is not an Ed25519 key; `rollart registry keygen` makes one")
    return CryptoSigner(private)


def _unlocked(path: Path, pem: bytes, ask: Ask | None) -> object:
    passphrase = os.environ.get(PASSPHRASE_VARIABLE, "")
    encrypted = b"ENCRYPTED" in pem
    if encrypted and not passphrase:
        if ask is None:
            raise RegistryError(f"{path} is encrypted: set {PASSPHRASE_VARIABLE}")
        passphrase = ask(f"Passphrase of {path}")
    try:
        return load_pem_private_key(pem, passphrase.encode() if encrypted else None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        reason = "wrong passphrase, or a damaged key" if encrypted else "a damaged key"
        raise RegistryError(f"cannot load {path}: {reason}") from None


def _write_new(path: Path, data: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
