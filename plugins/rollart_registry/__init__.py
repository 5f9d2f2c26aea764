"""The community registry: a static tree of files that anyone can host, secured with TUF.

    owner: keygen, publish, yank -> submission -> operator: accept, refresh -> tree -> any server
                                                                                  |
    user: install <- pip, hashes <- plan shown <- wheel verified <- TUF client <--+

Takes: wheels, keys, a folder or URL. Gives: signed metadata, verified wheels, installed packages
and a lock. Never: does cryptography or verifies metadata for a client by itself (python-tuf does),
lets a private key leave its file, or imports a package before somebody has agreed to install it.
``docs/registry.md`` has the roles and the threat model.
"""
