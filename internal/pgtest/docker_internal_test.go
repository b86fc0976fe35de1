package pgtest

import (
	"context"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// requireDocker skips a test unless Docker was asked for, since an image may have to be pulled.
func requireDocker(t *testing.T) Option {
	t.Helper()

	if os.Getenv(sourceVariable) != string(SourceDocker) {
		t.Skip("only with LEGION_TEST_POSTGRES=docker")
	}
	if _, err := exec.LookPath("docker"); err != nil {
		t.Skip(err)
	}

	return func(c *config) { c.getenv = os.Getenv }
}

// containerExists asks Docker's own client.
func containerExists(ctx context.Context, id string) bool {
	return exec.CommandContext(ctx, "docker", "container", "inspect", id).Run() == nil
}

func TestContainerHasTheSettingsAndIsRemovedByStop(t *testing.T) {
	t.Parallel()

	server, err := Start(t.Context(), requireDocker(t), WithSetting("work_mem", "7MB"))
	require.NoError(t, err)
	require.Equal(t, SourceDocker, server.Source())
	require.True(t, containerExists(t.Context(), server.details.Container))
	for name, value := range map[string]string{"fsync": "off", "work_mem": "7MB", "max_connections": "300"} {
		require.Equal(t, value, show(t, server, name), name)
	}

	require.NoError(t, server.Stop())
	require.False(t, containerExists(t.Context(), server.details.Container))
}

func TestContainerThatEndsIsReportedWithItsLog(t *testing.T) {
	t.Parallel()

	_, err := Start(t.Context(), requireDocker(t), WithSetting("no_such_setting", "on"))
	require.ErrorContains(t, err, "the container ended with exit code")
	require.ErrorContains(t, err, `unrecognized configuration parameter "no_such_setting"`)
}

func TestContainerIsRemovedWhenItsOwnerIsKilled(t *testing.T) {
	t.Parallel()
	requireDocker(t)

	owner := startOwners(t, role(t, ownerRole, sourceVariable+"=docker"))[0]
	requireConnection(t, owner.Database)
	require.True(t, containerExists(t.Context(), owner.Reply.Container))

	require.NoError(t, owner.process.Kill())
	_ = owner.wait()
	require.Eventually(t, func() bool {
		return !containerExists(context.WithoutCancel(t.Context()), owner.Reply.Container)
	}, time.Minute, 50*time.Millisecond)
}
