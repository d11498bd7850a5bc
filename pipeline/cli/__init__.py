"""The command line: each module holds some commands, their parsers beside their handlers."""
