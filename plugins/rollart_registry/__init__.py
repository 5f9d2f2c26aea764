"""The community registry: a static tree of files that anyone can host, secured with TUF.

    owner: keygen, publish, yank -> submission -> operator: accept, refresh -> tree -> any server
                                                                                  |
    user: install <- pip, hashes <- plan shown <- wheel verified <- TUF client <--+

Takes: wheels, keys, a folder or URL. Gives: signed metadata, verified wheels, installed packages
and a lock. Never: implements cryptography or metadata verification (python-tuf does both), copies a
private key out of its file, or imports a package before the user has agreed to install it.
``docs/guides/registry.md`` has the roles and the threat model.
"""
