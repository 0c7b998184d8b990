"""The one exception that means "the user can fix this": launchers print its sentence and exit, without a traceback."""


class UserError(Exception):
    """A mistake in a config, file, checkpoint or data line.

    The message is one sentence for a person: the value found, the rule it breaks, and the nearest fix.
    """
