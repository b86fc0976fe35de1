package pgtest

import (
	"bytes"
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// setupProxy returns a proxy, and two connections through it and past it.
func setupProxy(t *testing.T) (proxy *Proxy, through string, proxied, direct *pgx.Conn) {
	t.Helper()

	dsn := Database(t)
	config, err := pgx.ParseConfig(dsn)
	require.NoError(t, err)

	if config.TLSConfig != nil {
		t.Skip("what is said to this server is encrypted")
	}

	proxy, through = StartProxyBefore(t, dsn)
	connect := func(dsn string) *pgx.Conn {
		connection, err := pgx.Connect(t.Context(), dsn)
		require.NoError(t, err)
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Second)
			defer cancel()
			_ = connection.Close(ctx)
		})

		return connection
	}
	proxied = connect(through)
	direct = connect(dsn)

	return proxy, through, proxied, direct
}

func TestAProxyPassesEverythingAndCounts(t *testing.T) {
	t.Parallel()

	proxy, _, proxied, _ := setupProxy(t)
	before := proxy.Sent()

	var length int
	text := string(bytes.Repeat([]byte("x"), 3*maxSaid))
	require.NoError(t, proxied.QueryRow(t.Context(), "SELECT length($1::text)", text).Scan(&length))
	require.Len(t, text, length)
	require.Greater(t, proxy.Sent(), before)
	require.Equal(t, 1, proxy.Dials())
}

func TestAProxyRefusesUntilItPassesAgain(t *testing.T) {
	t.Parallel()

	proxy, through, proxied, _ := setupProxy(t)
	proxy.Set(ProxyRefuses)
	require.Error(t, proxied.Ping(t.Context()))
	_, err := pgx.Connect(t.Context(), through)
	require.Error(t, err)
	require.Greater(t, proxy.Dials(), 1)

	proxy.Set(ProxyPasses)
	again, err := pgx.Connect(t.Context(), through)
	require.NoError(t, err)
	require.NoError(t, again.Close(t.Context()))
}

func TestWhatAProxyHasSwallowedStaysLost(t *testing.T) {
	t.Parallel()

	proxy, _, proxied, direct := setupProxy(t)
	proxy.Set(ProxySwallows)

	sent := proxy.Sent()
	unanswered := make(chan error, 1)
	go func() { unanswered <- proxied.Ping(t.Context()) }()
	require.Eventually(t, func() bool { return proxy.Sent() > sent }, time.Minute, time.Millisecond)
	require.NoError(t, direct.Ping(t.Context()))
	require.Empty(t, unanswered)

	proxy.Set(ProxyPasses)
	require.Error(t, <-unanswered, "it was cut, since its statement is gone")
}

func TestAProxyLosesWhatItsJudgeNames(t *testing.T) {
	t.Parallel()

	for name, before := range map[string]bool{"before the server has heard it": true, "after the server has answered": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			proxy, _, proxied, direct := setupProxy(t)
			_, err := proxied.Exec(t.Context(), "CREATE TABLE notes (text text)")
			require.NoError(t, err)

			var answered atomic.Bool
			proxy.Judge(func(said []byte) *Loss {
				if !bytes.Contains(said, []byte("lost note")) {
					return nil
				}

				return &Loss{Before: before, Answered: func() { answered.Store(true) }}
			})

			_, err = proxied.Exec(t.Context(), "INSERT INTO notes VALUES ('kept note')")
			require.NoError(t, err)
			_, err = proxied.Exec(t.Context(), "INSERT INTO notes VALUES ('lost note')")
			require.Error(t, err)
			require.Equal(t, !before, answered.Load())

			var notes int
			require.NoError(t, direct.QueryRow(t.Context(), "SELECT count(*) FROM notes").Scan(&notes))
			require.Equal(t, map[bool]int{true: 1, false: 2}[before], notes)
		})
	}
}
