package pgtest

import "slices"

// setting is a configuration parameter of the server.
type setting struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// config is what the options of Start add up to.
type config struct {
	getenv   func(string) string
	patterns []string
	settings []setting
	restarts bool

	environment []setting
	diskSize    int64

	repository string // of the embedded source; empty: Maven Central
	cache      string // of the embedded source; empty: in the user's cache directory
}

// Option changes how [Start] runs a server.
type Option func(*config)

// WithSetting sets a configuration parameter of the server, such as fsync to on. The last value given
// to a name counts. The server of LEGION_TEST_DSN can't be changed, so with that source Start fails
// unless the server has the value already, written as SHOW writes it.
func WithSetting(name, value string) Option {
	return func(c *config) { c.settings = withSetting(c.settings, setting{name, value}) }
}

// WithRestarts starts the server again when it ends, on the same port and data, as an init system
// would. It is for a server that runs from binaries on this machine, see [Server.Signal].
func WithRestarts() Option {
	return func(c *config) { c.restarts = true }
}

// WithEnvironment sets an environment variable of the server, and of nothing else. It is for a server
// that runs from binaries on this machine: for another one Start fails with [ErrElsewhere].
func WithEnvironment(name, value string) Option {
	return func(c *config) { c.environment = withSetting(c.environment, setting{name, value}) }
}

// WithDisk gives the server a disk of its own, of so many bytes, in memory: with all its data, so that a
// test can fill it up, see [Server.Disk]. Nobody else sees it, and it goes away with the server's last
// process, however that ends.
//
// Only Linux has it, and it needs the right to mount, which root often lacks in a container: without,
// Start fails with [ErrNoDisk]. So does it with [ErrElsewhere] for a server that does not run from
// binaries on this machine.
func WithDisk(size int64) Option {
	return func(c *config) { c.diskSize = size }
}

// WithDurability switches on fsync, synchronous_commit and full_page_writes, as in production. Use it
// where the time of a commit matters.
func WithDurability() Option {
	return func(c *config) {
		for _, each := range durability("on") {
			c.settings = withSetting(c.settings, each)
		}
	}
}

func durability(value string) []setting {
	return []setting{{"fsync", value}, {"synchronous_commit", value}, {"full_page_writes", value}}
}

// defaultSettings make a server that lives for one run of tests quick, and wide enough for parallel
// tests with a pool each.
func defaultSettings() []setting {
	return append(durability("off"), setting{"max_connections", "300"})
}

// withSetting returns settings with one added, or replaced.
func withSetting(settings []setting, added setting) []setting {
	others := slices.DeleteFunc(slices.Clone(settings), func(each setting) bool { return each.Name == added.Name })

	return append(others, added)
}

// arguments are the settings as postgres takes them on its command line.
func arguments(settings []setting) []string {
	options := make([]string, 0, len(settings)*2)
	for _, each := range settings {
		options = append(options, "-c", each.Name+"="+each.Value)
	}

	return options
}
