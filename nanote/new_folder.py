"""A folder that is written as a whole: `new_folder` puts it in place when it is complete.

    .<name>.tmp/lock    is locked while a process writes the folder <name>
    .<name>.tmp/new     is the folder until it is complete, and is then renamed
    .<name>.tmp/old     is the one before it, until it is deleted; after a kill -9 the next call puts it back
"""
import fcntl
import os
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def new_folder(out_dir, advice, check_replaceable):
    """Yield an empty folder that becomes `out_dir` when the block ends without an exception. A second process
    that writes the same `out_dir` is refused.

    advice: ends the message about a folder that cannot be written.
    check_replaceable: raises ValueError unless files of these names, a set, may be deleted with `out_dir`.
    """
    target = Path(os.path.realpath(out_dir))  # a link stays, and the folder behind it is replaced
    if target == Path.cwd() or target.is_mount():
        raise ValueError(f"{out_dir}: cannot be replaced; name a folder in it, such as {out_dir}/tokens")
    work = target.with_name(f".{target.name}.tmp")
    new = work / "new"
    old = work / "old"
    try:
        with locked_folder(work, f"{out_dir}: another process is writing it; wait for its end, or {advice}"):
            try:
                tidy(new, old, target)  # after kill -9
                names = set(os.listdir(target)) if target.exists() else set()
                if names:
                    check_replaceable(names)
                new.mkdir()
                yield new
                if target.exists():
                    os.rename(target, old)
                os.rename(new, target)
            finally:
                tidy(new, old, target)
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"{out_dir}: cannot be written ({reason}); {advice}") from error


def check_new(out_dir):
    """Raise ValueError if there is such a file or folder."""
    if os.path.lexists(out_dir):
        raise ValueError(f"{out_dir}: exists; name another folder")


def tidy(new, old, target):
    """Put the old folder back if its place is empty; remove what else is left."""
    if old.exists() and not target.exists():
        os.rename(old, target)
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(new, ignore_errors=True)


@contextmanager
def locked_folder(folder, refusal):
    """Make a folder that is locked inside the context and removed after it. Raise ValueError(refusal) if it
    is locked already."""
    lock = take_lock(folder)
    if lock is None:
        raise ValueError(refusal)
    with lock:
        try:
            yield
        finally:
            Path(lock.name).unlink(missing_ok=True)  # the last: whoever makes it anew has the folder
            with suppress(OSError):
                folder.rmdir()


def take_lock(folder):
    """Make a folder, and lock the file `lock` in it until the returned file is closed or the process ends.
    Return None if another process holds the lock."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "lock"
        try:
            file = open(path, "a")
        except FileNotFoundError:  # another process has just removed the folder
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError:  # a file system without locks
            return file
        if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
            return file
        file.close()  # another process has removed the file between open and flock
