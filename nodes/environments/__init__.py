"""Environments: nodes in a pool of their own that answer each turn of a conversation (see `converse`).

An environment reads `Rollouts` and returns `Replies`; `@environment` makes one of a plain function, and answers several
groups at once. It keeps no state: it reads what it needs from a conversation's transcript, so that nothing is lost on
a resume.
"""
