package pgtest

import (
	"context"
	"net"
	"net/url"
	"sync"
	"testing"
)

// maxSaid is how much a proxy reads at once, more than a test's statement has.
const maxSaid = 64 << 10

// A Proxy is a TCP proxy before a server, on which a test loses what it wants to. It is safe for
// concurrent use.
type Proxy struct {
	listener net.Listener
	server   string

	mutex sync.Mutex
	mode  ProxyMode
	judge func(said []byte) *Loss
	dials int
	sent  int
	open  map[net.Conn]struct{}
}

// ProxyMode is what a [Proxy] does with what it is given.
type ProxyMode int

const (
	// ProxyPasses hands on what comes. A proxy starts with it.
	ProxyPasses ProxyMode = iota

	// ProxyRefuses closes every connection.
	ProxyRefuses

	// ProxySwallows takes what comes and hands nothing on, as a network does that is gone.
	ProxySwallows
)

// A Loss is a connection that is cut.
type Loss struct {
	// Before cuts it before the server hears what the client has said. Otherwise it is cut when the
	// server answers, before the client hears that.
	Before bool

	// Answered, if it is not nil, is called once the server has answered. Nothing is handed on
	// meanwhile.
	Answered func()
}

// StartProxy returns a proxy before the server at address, a host with a port. It ends with the test.
func StartProxy(tb testing.TB, address string) *Proxy {
	tb.Helper()
	listener, err := new(net.ListenConfig).Listen(tb.Context(), "tcp", net.JoinHostPort("127.0.0.1", "0"))
	if err != nil {
		tb.Fatalf("legion: listen for a proxy: %v", err)
	}
	proxy := &Proxy{listener: listener, server: address, open: make(map[net.Conn]struct{})}
	ctx, cancel := context.WithCancel(context.WithoutCancel(tb.Context()))
	var running sync.WaitGroup
	running.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			running.Go(func() { proxy.serve(ctx, client) })
		}
	})
	tb.Cleanup(func() {
		_ = listener.Close()
		cancel()
		proxy.Set(ProxyRefuses)
		running.Wait()
	})

	return proxy
}

// StartProxyBefore returns a proxy before the server of a DSN, which has to be a URL, and the DSN of
// the same database through it.
func StartProxyBefore(tb testing.TB, dsn string) (proxy *Proxy, through string) {
	tb.Helper()
	location, err := url.Parse(dsn)
	if err != nil || location.Host == "" {
		tb.Fatal("legion: a proxy needs a DSN that is a URL with a host")
	}
	proxy = StartProxy(tb, location.Host)
	location.Host = proxy.Address()

	return proxy, location.String()
}

// Address is where the proxy listens, a host with a port.
func (p *Proxy) Address() string { return p.listener.Addr().String() }

// Set changes the mode. Open connections are cut by ProxyRefuses, and when ProxySwallows ends, since
// what it has swallowed is missing on them.
func (p *Proxy) Set(mode ProxyMode) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if mode == ProxyRefuses || p.mode == ProxySwallows && mode != ProxySwallows {
		for connection := range p.open {
			_ = connection.Close()
		}
	}
	p.mode = mode
}

// Judge has judge asked about everything that a client says, as it arrives: a statement of some
// kilobytes does so in one piece. Nil passes; a Loss is the end of that connection. judge is called
// concurrently. Nil asks nobody.
func (p *Proxy) Judge(judge func(said []byte) *Loss) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.judge = judge
}

// Dials counts the connections that clients have opened, also those that were refused.
func (p *Proxy) Dials() int {
	p.mutex.Lock()
	defer p.mutex.Unlock()

	return p.dials
}

// Sent counts how often clients have said something.
func (p *Proxy) Sent() int {
	p.mutex.Lock()
	defer p.mutex.Unlock()

	return p.sent
}

func (p *Proxy) serve(ctx context.Context, client net.Conn) {
	defer func() { _ = client.Close() }()
	server, err := new(net.Dialer).DialContext(ctx, "tcp", p.server)
	if err != nil {
		return
	}
	defer func() { _ = server.Close() }()
	if !p.enter(client, server) {
		return
	}
	defer p.leave(client, server)

	// loss is set when the server's next words are not to arrive.
	var (
		mutex      sync.Mutex
		loss       *Loss
		directions sync.WaitGroup
	)
	directions.Go(func() {
		p.forward(client, server, func(said []byte) bool {
			found := p.hear(said)
			if found == nil {
				return true
			}
			mutex.Lock()
			defer mutex.Unlock()
			loss = found

			return !found.Before
		})
	})
	directions.Go(func() {
		p.forward(server, client, func([]byte) bool {
			mutex.Lock()
			unheard := loss
			mutex.Unlock()
			if unheard != nil && unheard.Answered != nil {
				unheard.Answered()
			}

			return unheard == nil
		})
	})
	directions.Wait()
}

// enter says that a connection was opened, and reports whether it may go on.
func (p *Proxy) enter(client, server net.Conn) bool {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.dials++
	if p.mode == ProxyRefuses {
		return false
	}
	p.open[client], p.open[server] = struct{}{}, struct{}{}

	return true
}

func (p *Proxy) leave(client, server net.Conn) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	delete(p.open, client)
	delete(p.open, server)
}

// hear counts what a client has said, and asks the judge.
func (p *Proxy) hear(said []byte) *Loss {
	p.mutex.Lock()
	p.sent++
	judge := p.judge
	p.mutex.Unlock()
	if judge == nil {
		return nil
	}

	return judge(said)
}

// forward hands on what comes until pass says no, or either side is closed. Then it closes both, and
// with them the other direction.
func (p *Proxy) forward(from, to net.Conn, pass func(said []byte) bool) {
	defer func() { _, _ = from.Close(), to.Close() }()
	buffer := make([]byte, maxSaid)
	for {
		length, err := from.Read(buffer)
		if err != nil || !pass(buffer[:length]) {
			return
		}
		p.mutex.Lock()
		swallowed := p.mode == ProxySwallows
		p.mutex.Unlock()
		if swallowed {
			continue
		}
		if _, err := to.Write(buffer[:length]); err != nil {
			return
		}
	}
}
