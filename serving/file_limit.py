"""How many files, and so how many connections, the server's processes may have open."""

import logging
import resource

logger = logging.getLogger(__name__)

WANTED_FILES = 65535


def raise_file_limit(wanted: int = WANTED_FILES) -> int:
    """Raises this process's limit to ``wanted`` open files, as far as the system allows; children inherit it.

    Returns the limit in force. One that stays below ``wanted`` is logged with what it means.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (OSError, ValueError) as error:
        logger.warning("cannot raise the limit on open files from %d to %d: %s", soft, limit, error)
        limit = soft
    if limit < wanted:
        logger.warning(
            "at most %d files may be open: clients beyond about %d wait until others leave (ulimit -n raises it)",
            limit,
            max(0, limit - 100),
        )
    return limit
