// The same build with the client for JavaScript.
import { Sandbox, Template } from 'e2b'

const [base, name] = process.argv.slice(2)
const seen = {}
const log = []
const template = Template({ fileContextPath: process.cwd() })
  .fromTemplate(base)
  .copy('folder', 'copied')
  .runCmd(`echo ${name} by $(id -un)`)
await Template.build(template, name, { onBuildLogs: (entry) => log.push(entry.message) })
seen.exists = [await Template.exists(name), await Template.exists(`${name}-not`)]
const sandbox = await Sandbox.create(name, { timeoutMs: 60_000 })
seen.seen = (await sandbox.commands.run('cat copied/a.txt; stat -c %U copied/a.txt')).stdout
await sandbox.kill()
seen.logged = log.includes(`${name} by user`)
await Template.build(template.runCmd('exit 4'), name).catch((error) => (seen.failed = error.message))
seen.deleted = [await Sandbox.deleteSnapshot(name), await Sandbox.deleteSnapshot(name)]
console.log(JSON.stringify(seen))
