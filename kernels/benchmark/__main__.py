import signal
import sys

from .measure import main

if __name__ == "__main__":
    for kind in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C: main must kill the process that measures
        if signal.getsignal(kind) is signal.SIG_DFL:
            signal.signal(kind, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:  # finished results are printed and saved by --json
        sys.exit(130)
