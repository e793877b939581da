"""What a model can talk to: nodes in a pool of their own that answer each turn of a conversation (see `converse`).

An environment reads `Rollouts` and gives `Replies`; `@environment` makes one of a plain function, and answers several
groups at once. It keeps no state: what it needs to know of a conversation it reads in its transcript, so that nothing
is lost on a resume.
"""
