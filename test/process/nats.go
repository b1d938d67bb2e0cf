package process

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

const nats = "github.com/nats-io/nats-server/v2"

// BuildNATS builds the NATS server of the module's version into a directory and returns the binary's
// path.
func BuildNATS(dir string) (string, error) {
	binary := filepath.Join(dir, "nats-server")
	cmd := exec.Command("go", "build", "-trimpath", "-o", binary, nats)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	_, err := run(cmd)
	return binary, err
}

// NATSServers returns the processes of a cluster of NATS servers that sync each record, with their
// files in a directory, and the URL for clients, which do not learn the addresses otherwise. Admin of each is its
// monitoring port. They are not started.
func NATSServers(binary, dir string, n int) (nodes []*Posthorn, url string, err error) {
	var clients, routes, monitoring []string
	for range n {
		clients, routes, monitoring = append(clients, FreeAddr()), append(routes, FreeAddr()), append(monitoring, FreeAddr())
	}
	for i := range n {
		config := filepath.Join(dir, fmt.Sprintf("nats-%d.conf", i))
		text := fmt.Sprintf("server_name: n%d\nlisten: %q\nhttp: %q\njetstream { store_dir: %q, sync_interval: always, max_file_store: 200GB }\ncluster { name: test, listen: %q, no_advertise: true, routes: [%s] }\n",
			i, clients[i], monitoring[i], filepath.Join(dir, fmt.Sprint("nats-", i)), routes[i], "nats://"+strings.Join(routes, ", nats://"))
		if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
			return nil, "", err
		}
		nodes = append(nodes, &Posthorn{Binary: binary, Args: []string{"-c", config}, Admin: monitoring[i]})
	}
	return nodes, "nats://" + strings.Join(clients, ",nats://"), nil
}
