"""Launchers: who starts the processes of an executor's workers."""
