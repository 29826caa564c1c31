"""The commit log: what verified completions committed, kept to be read again, followed and gone on from."""
