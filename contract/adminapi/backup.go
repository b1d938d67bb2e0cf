package adminapi

import (
	"context"
	"errors"
	"io"
	"net/http"
)

// BackupPath is the path of POST requests for a backup of the dispatcher's data directory. The
// response is an archive of package backup; a response that ends early is not whole. Without a guard
// of the admin API, the request needs the token in the data directory as its bearer token.
const BackupPath = "/backup"

// ErrBackupRunning means that another backup of the same dispatcher is in progress.
var ErrBackupRunning = errors.New("another backup of this dispatcher is in progress; wait for its end")

// Backup opens a backup of the dispatcher's data directory. The caller closes it. An empty token is
// not sent.
func (c *Client) Backup(ctx context.Context, token string) (io.ReadCloser, error) {
	header := http.Header{}
	if token != "" {
		header.Set("Authorization", "Bearer "+token)
	}
	resp, err := c.send(ctx, http.MethodPost, BackupPath, nil, header)
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}
