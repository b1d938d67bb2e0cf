package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/cli-runtime/pkg/printers"
	"sigs.k8s.io/yaml"

	"github.com/posthorn/posthorn/cmd/internal/command"
)

// resourceNames maps the names of kinds that users may type to resources.
var resourceNames = map[string]string{
	"source": "sources", "sources": "sources", "psrc": "sources",
	"destination": "webhookdestinations", "destinations": "webhookdestinations", "whd": "webhookdestinations",
	"webhookdestination": "webhookdestinations", "webhookdestinations": "webhookdestinations",
	"audience": "audiences", "audiences": "audiences", "paud": "audiences",
	"deletionrequest": "deletionrequests", "deletionrequests": "deletionrequests", "deletions": "deletionrequests", "pdel": "deletionrequests",
	"redelivery": "redeliveries", "redeliveries": "redeliveries", "rdl": "redeliveries",
}

func newGet() *cobra.Command {
	var d direct
	var output, namespace string
	cmd := &cobra.Command{
		Use:   "get sources|destinations|audiences|deletions|redeliveries [NAME]",
		Short: "Show Sources, WebhookDestinations and objects of the other kinds with their status (standalone)",
		Long: `Prints the objects of a Posthorn that runs without a cluster, in the format of
kubectl get. With -o yaml or -o json it prints whole objects with their status.`,
		Example: `  posthorn get destinations
  posthorn get destinations -o wide
  posthorn get destination crm -o yaml`,
		ValidArgs: []string{"sources", "destinations", "audiences", "deletions", "redeliveries"},
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return command.Usagef("the kind is missing: sources, destinations, audiences, deletions or redeliveries")
			}
			if resourceNames[strings.ToLower(args[0])] == "" {
				return command.Usagef("%q is not one of sources, destinations, audiences, deletions, redeliveries", args[0])
			}
			if len(args) > 2 {
				return command.Usagef("unexpected argument %q", args[2])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			path := apiPrefix
			if namespace != "" {
				path += "/namespaces/" + url.PathEscape(namespace)
			}
			path += "/" + resourceNames[strings.ToLower(args[0])]
			if len(args) == 2 {
				path += "/" + url.PathEscape(args[1])
			}
			out := cmd.OutOrStdout()
			if output == "json" || output == "yaml" {
				body, err := d.resource(cmd, path, "application/json")
				if err != nil {
					return err
				}
				if output == "yaml" {
					if body, err = yaml.JSONToYAML(body); err != nil {
						return err
					}
				}
				_, err = out.Write(body)
				return err
			}
			body, err := d.resource(cmd, path+"?includeObject=Metadata", "application/json;as=Table;v=v1;g=meta.k8s.io")
			if err != nil {
				return err
			}
			var table metav1.Table
			if err := json.Unmarshal(body, &table); err != nil {
				return fmt.Errorf("the response is not a table: %w", err)
			}
			if len(table.Rows) == 0 {
				fmt.Fprintln(cmd.ErrOrStderr(), "No resources found.")
				return nil
			}
			return printers.NewTablePrinter(printers.PrintOptions{Wide: output == "wide", WithNamespace: severalNamespaces(&table)}).PrintObj(&table, out)
		},
	}
	f := cmd.Flags()
	d.adminFlag(cmd)
	command.OutputFlag(cmd, &output, "", "wide, yaml or json", "wide", "yaml", "json")
	f.StringVarP(&namespace, "namespace", "n", "", "only this namespace")
	return cmd
}

// severalNamespaces reports whether a table has rows of more than one namespace.
func severalNamespaces(t *metav1.Table) bool {
	first := ""
	for i := range t.Rows {
		var m metav1.PartialObjectMetadata
		if json.Unmarshal(t.Rows[i].Object.Raw, &m) != nil {
			continue
		}
		t.Rows[i].Object.Object = &m
		if first == "" {
			first = m.Namespace
		}
		if m.Namespace != first {
			for ; i < len(t.Rows); i++ {
				var m metav1.PartialObjectMetadata
				if json.Unmarshal(t.Rows[i].Object.Raw, &m) == nil {
					t.Rows[i].Object.Object = &m
				}
			}
			return true
		}
	}
	return false
}

// resource requests a path of the resources that posthorn run serves, and prints the warnings of
// the response.
func (d *direct) resource(cmd *cobra.Command, path, accept string) ([]byte, error) {
	body, warnings, err := d.request(cmd.Context(), path, accept)
	for _, w := range warnings {
		fmt.Fprintln(cmd.ErrOrStderr(), "Warning:", w.Text)
	}
	return body, err
}

// read requests a path of the resources that posthorn run serves, and decodes the response.
func (d *direct) read(ctx context.Context, path string, into any) error {
	body, _, err := d.request(ctx, path, "application/json")
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

func (d *direct) request(ctx context.Context, path, accept string) ([]byte, []utilnet.WarningHeader, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	t, err := d.target()
	if err != nil {
		return nil, nil, err
	}
	resp, err := t.Get(ctx, path, accept)
	if err != nil {
		return nil, nil, t.explain(err)
	}
	defer resp.Body.Close()
	warnings, _ := utilnet.ParseWarningHeaders(resp.Header.Values("Warning"))
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxResourceBytes))
	return body, warnings, err
}

// maxResourceBytes bounds the bytes read of a response.
const maxResourceBytes = 64 << 20
