"""What touches a foreign package, one module each, for Python 3.8 and the standard library alone.

Any interpreter that has the foreign package can load such a module by its path, without RollArt:
:mod:`rollart_sandboxes.isolation.server` does, in this process or in one of its own. A module has

    IMPORTS = ("gymnasium",)         what it imports of the foreign package, before all else
    GLOBAL_RANDOM = True             optional: the package draws from `random` or `numpy.random`;
                                     each session then has those states for itself
    def describe(env_id, options)    what is known of an environment: a dict with any of
                                     reward_range, max_turns, deterministic, licence, network,
                                     summary, splits ({name: [first seed, end]}), timeouts
    class Session                    one environment, see below

Both get the options of the adapter's config model as a dict. ``describe`` and ``Session`` raise
LookupError for an id that does not exist (with a message a person can use) and ValueError for
options that do not fit it. A session has

    Session(env_id, options)
    offers = ("oracle", "secrets")   which of the two optional methods this environment has
    prompt = "..."                   optional: what is said before the first observation
    max_turns = 200                  optional: turns after which the episode is truncated
    splits = {"train": [0, 500]}     optional: seed ranges, as describe gives them
    messages = True                  optional: observations are lists of messages, not text
    reset(seed, task) -> (observation, info)     task: {"split": "train", "index": 3}
    step(action) -> (observation, reward, terminated, truncated, info)
    oracle() -> str or None; secrets() -> list of str
    close()

Observations are text or lists of {"role", "content"}. What is neither number, text, list nor dict
is left out of ``info``.
"""
