package pgtest

import (
	"os"
	"path/filepath"
)

// mavenCentral is where the binaries of the embedded source are published.
const mavenCentral = "https://repo1.maven.org/maven2"

// downloadCache is where downloads are kept for the next run; empty where the user has no cache
// directory.
func downloadCache() string {
	caches, err := os.UserCacheDir()
	if err != nil {
		return ""
	}

	return filepath.Join(caches, "legion-pgtest")
}
