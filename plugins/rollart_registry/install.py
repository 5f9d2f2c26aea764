"""Install from a registry, or from a lock, with all hashes known before pip starts.

Takes: a plan or a lock, an interpreter. Gives: an environment in which every file of the registry's
packages was compared with its wheel, and a lock. Never: starts pip before all packages from the
registry are verified.
"""

from __future__ import annotations

from pathlib import Path

from rollart_core.errors import RegistryError
from rollart_registry.client import RegistryClient, opened
from rollart_registry.interpreter import TargetInterpreter
from rollart_registry.lock import Lock, LockedPackage, lock_of, merged, read_lock
from rollart_registry.plan import Plan, check_no_shadowing
from rollart_registry.trust import Trusted, fingerprint, offered_root, trust, trusted
from rollart_registry.verify import differing_files
from rollart_registry.wheel import Wheel, read_wheel


def install(plan: Plan, trusted: Trusted, interpreter: TargetInterpreter, lock: Path) -> Lock:
    """Execute a plan, and write the lock.

    Raises:
        RegistryError: If pip fails, or the installed files differ from the verified ones.
    """
    before = read_lock(lock) if lock.exists() else None
    new = merged(before, lock_of(plan, trusted), lock)
    _install([wheel for _, wheel in plan.releases], lock_of(plan, trusted), interpreter)
    new.write(lock)
    return new


def sync(
    lock: Lock, interpreter: TargetInterpreter, *, allow_drift: bool = False
) -> tuple[str, ...]:
    """Install exactly the packages of a lock into an environment.

    Args:
        lock: The lock; the registry's root that it names is trusted.
        interpreter: The interpreter to install into.
        allow_drift: Allow other versions of packages that were only present when the lock was made.

    Returns:
        The packages that were installed; empty if all were present.

    Raises:
        RegistryError: If installation is not possible; then nothing was installed.
    """
    drift = [
        f"{p.name} {p.version} (here: {found.version if found else 'none'})"
        for p in lock.present
        if (found := interpreter.installed.get(p.name)) is None or found.version != p.version
    ]
    if drift and not allow_drift:
        raise RegistryError(
            f"the lock was made with these packages installed: {', '.join(drift)}. Install them "
            "first, allow the difference with --allow-drift, or lock them too:  "
            "rollart registry install --lock-all"
        )
    with opened(trusted_by(lock)) as client:
        wheels = _locked_wheels(client, lock)
    wheels = {n: w for n, w in wheels.items() if differing_files(w, interpreter)}
    missing = tuple(
        p
        for p in lock.packages
        if (p.name in wheels) or (p.target is None and not _has(interpreter, p))
    )
    if missing:
        some = Lock(
            registry=lock.registry, root=lock.root, ids=lock.ids, packages=missing, present=()
        )
        _install(list(wheels.values()), some, interpreter)
    return tuple(f"{p.name} {p.version}" for p in missing)


def trusted_by(lock: Lock) -> Trusted:
    """Return the registry of a lock, trusted with the root that the lock names.

    Raises:
        RegistryError: If the registry has a different root under that version.
    """
    known = trusted(lock.registry)
    root = known.root if known else offered_root(lock.registry, lock.root.version)
    if fingerprint(root) != lock.root.sha256:
        raise RegistryError(
            f"{lock.registry} has the root {fingerprint(root)}, and the lock was made with "
            f"{lock.root.sha256}: it is another registry, or somebody replaced it"
        )
    return known or trust(lock.registry, root)


def _locked_wheels(client: RegistryClient, lock: Lock) -> dict[str, Wheel]:
    wheels = {}
    for package in lock.packages:
        if package.target is not None:
            wheel = read_wheel(client.download(package.target, package.sha256))
            wheels[wheel.distribution] = wheel
        elif client.owner_of(package.name) is not None:
            message = f"the lock takes {package.name!r} from an index, but it is in the registry"
            raise RegistryError(message)
    return wheels


def _has(interpreter: TargetInterpreter, package: LockedPackage) -> bool:
    found = interpreter.installed.get(package.name)
    return found is not None and found.version == package.version


def _install(wheels: list[Wheel], lock: Lock, interpreter: TargetInterpreter) -> None:
    check_no_shadowing(wheels, interpreter)
    pinned = [p.pinned() for p in lock.packages if p.target is None]
    pinned = [p for p in pinned if not _has(interpreter, LockedPackage(p.name, p.version, "", ""))]
    interpreter.install({wheel.path: wheel.sha256 for wheel in wheels}, pinned)
    after = interpreter.again()
    for wheel in wheels:
        differing = differing_files(wheel, after)
        if differing:
            raise RegistryError(f"{wheel.name} was installed, but {differing[0]}")
    check_no_shadowing(wheels, after)  # files from the index are known only now
