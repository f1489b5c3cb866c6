"""Let Ctrl-C while a command imports its libraries, which takes seconds, end it without a traceback.

Each command imports this first; `run_command` sets Python's own handler again. SIGINT that is ignored, as
under nohup, stays ignored.
"""
import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
