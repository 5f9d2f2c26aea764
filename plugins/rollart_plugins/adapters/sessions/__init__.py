"""Session modules for foreign packages, for Python 3.8 and the standard library only.

Any interpreter with the foreign package can load such a module by its path, without RollArt.
:mod:`rollart_sandboxes.isolation.server` does this, in this process or in a separate one. A module
has

    IMPORTS = ("gymnasium",)         modules of the foreign package that are imported first
    GLOBAL_RANDOM = True             optional: the package draws from `random` or `numpy.random`;
                                     each session then has its own copy of these states
    def describe(env_id, options)    description of an environment: a dict with any of
                                     reward_range, max_turns, deterministic, licence, network,
                                     summary, splits ({name: [first seed, end]}), timeouts
    class Session                    one environment, see below

Both receive the options of the adapter's config model as a dict. ``describe`` and ``Session`` raise
LookupError for an id that does not exist (with a message for the user) and ValueError for options
that do not fit it. A session has

    Session(env_id, options)
    offers = ("oracle", "secrets")   which of the two optional methods this environment has
    prompt = "..."                   optional: text before the first observation
    max_turns = 200                  optional: turns after which the episode is truncated
    splits = {"train": [0, 500]}     optional: seed ranges, as describe returns them
    messages = True                  optional: observations are lists of messages, not text
    reset(seed, task) -> (observation, info)     task: {"split": "train", "index": 3}
    step(action) -> (observation, reward, terminated, truncated, info)
    oracle() -> str or None; secrets() -> list of str
    close()

Observations are text or lists of {"role", "content"}. Values of ``info`` that are not numbers,
text, lists or dicts are removed.
"""
