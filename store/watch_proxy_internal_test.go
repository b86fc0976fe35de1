package store

import (
	"context"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A proxy stands between the watch and the server.
type proxy struct {
	address string
	server  string

	mutex   sync.Mutex
	mode    mode
	dialled int
	written int
	open    map[net.Conn]struct{}
}

type mode int

const (
	// passing hands on what comes.
	passing mode = iota

	// refusing closes every connection.
	refusing

	// swallowing takes what comes and hands nothing on, as a network does that is gone.
	swallowing
)

func startProxy(t *testing.T, server string) *proxy {
	t.Helper()

	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)

	p := &proxy{address: listener.Addr().String(), server: server, open: map[net.Conn]struct{}{}}

	var running sync.WaitGroup

	running.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}

			running.Go(func() { p.serve(client) })
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()

		p.set(refusing)
		running.Wait()
	})

	return p
}

func (p *proxy) serve(client net.Conn) {
	defer func() { _ = client.Close() }()

	server, err := new(net.Dialer).DialContext(context.Background(), "tcp", p.server)
	if err != nil {
		return
	}
	defer func() { _ = server.Close() }()

	p.mutex.Lock()
	p.dialled++

	if p.mode == refusing {
		p.mutex.Unlock()

		return
	}

	p.open[client], p.open[server] = struct{}{}, struct{}{}
	p.mutex.Unlock()

	var both sync.WaitGroup

	for from, to := range map[net.Conn]net.Conn{client: server, server: client} {
		both.Go(func() {
			_, _ = io.Copy(writer{p, to, from == client}, from)
			_ = to.Close()
		})
	}

	both.Wait()
}

// writer hands on what comes unless the proxy swallows it.
type writer struct {
	proxy      *proxy
	to         net.Conn
	fromClient bool
}

func (w writer) Write(data []byte) (int, error) {
	w.proxy.mutex.Lock()
	swallows := w.proxy.mode == swallowing

	if w.fromClient {
		w.proxy.written++
	}

	w.proxy.mutex.Unlock()

	if swallows {
		return len(data), nil
	}

	return w.to.Write(data)
}

// set changes what the proxy does, and cuts what is open unless that is to be swallowed.
func (p *proxy) set(mode mode) {
	p.mutex.Lock()
	defer p.mutex.Unlock()

	if mode == refusing || p.mode == swallowing {
		for connection := range p.open {
			_ = connection.Close()
		}

		clear(p.open)
	}

	p.mode = mode
}

func (p *proxy) dials() int {
	p.mutex.Lock()
	defer p.mutex.Unlock()

	return p.dialled
}

// sent counts what the client has sent.
func (p *proxy) sent() int {
	p.mutex.Lock()
	defer p.mutex.Unlock()

	return p.written
}

// awaitDials waits for n more attempts to connect.
func (p *proxy) awaitDials(t *testing.T, n int) {
	t.Helper()

	before := p.dials()
	require.Eventually(t, func() bool { return p.dials() >= before+n }, time.Minute, time.Millisecond)
}
