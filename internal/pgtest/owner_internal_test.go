package pgtest

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// owner is a process that owns a server.
type owner struct {
	owned

	process *os.Process
	input   io.WriteCloser
	wait    func() error
	message *bytes.Buffer // its standard error, to be read after wait
}

// role prepares this test binary to run in a role instead of as tests, on server binaries of this
// machine unless the environment says otherwise.
func role(t *testing.T, name string, environment ...string) *exec.Cmd {
	t.Helper()

	executable, err := os.Executable()
	require.NoError(t, err)
	command := exec.CommandContext(t.Context(), executable)
	command.Env = append(os.Environ(), roleVariable+"="+name, sourceVariable+"=local", dsnVariable+"=")
	command.Env = append(command.Env, environment...)

	return command
}

// startOwners runs commands in the role of an owner and waits until their servers are ready.
func startOwners(t *testing.T, commands ...*exec.Cmd) []*owner {
	t.Helper()

	owners := make([]*owner, 0, len(commands))
	outputs := make([]io.Reader, 0, len(commands))
	for _, command := range commands {
		input, err := command.StdinPipe()
		require.NoError(t, err)
		output, err := command.StdoutPipe()
		require.NoError(t, err)
		message := new(bytes.Buffer)
		command.Stderr = message
		require.NoError(t, command.Start())
		owners = append(owners, &owner{process: command.Process, input: input, wait: command.Wait, message: message})
		outputs = append(outputs, output)
	}
	for i, started := range owners {
		if err := json.NewDecoder(outputs[i]).Decode(&started.owned); err != nil {
			_ = started.wait()
			require.NoError(t, err, started.message)
		}
	}

	return owners
}

// requireConnection asserts that a database answers.
func requireConnection(t *testing.T, dsn string) {
	t.Helper()

	connection, err := pgx.Connect(t.Context(), dsn)
	require.NoError(t, err)
	require.NoError(t, connection.Ping(t.Context()))
	require.NoError(t, connection.Close(t.Context()))
}
