// SPDX-License-Identifier: Apache-2.0
// Serves MQTT with aedes: node aedes.mjs <path of aedes.js> <host> <port>

import { createServer } from 'node:net'
import { pathToFileURL } from 'node:url'

const [module, host, port] = process.argv.slice(2)
const { Aedes } = await import(pathToFileURL(module))
const broker = await Aedes.createBroker({ queueLimit: 10_000, concurrency: 10_000 })
createServer({ noDelay: true }, broker.handle).listen(Number(port), host, 1024)
