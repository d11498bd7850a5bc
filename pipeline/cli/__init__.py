"""The command line: each module holds some commands, every parser beside its handler."""
