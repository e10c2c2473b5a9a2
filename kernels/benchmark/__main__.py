import signal
import sys

from .measure import main

if __name__ == "__main__":
    for kind in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C, for the process at work has to end too
        if signal.getsignal(kind) is signal.SIG_DFL:
            signal.signal(kind, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:  # what is measured is printed, and in the file of --json
        sys.exit(130)
